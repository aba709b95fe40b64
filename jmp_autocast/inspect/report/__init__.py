"""What a plan or a jaxpr says of a program: nothing is run."""
