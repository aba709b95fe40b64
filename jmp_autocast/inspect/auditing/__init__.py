"""`audit`: what is risky in a program that its author wrote in 16 bits."""
