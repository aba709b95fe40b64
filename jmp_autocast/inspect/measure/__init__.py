"""What the values of a program are when it runs, equation by equation."""
