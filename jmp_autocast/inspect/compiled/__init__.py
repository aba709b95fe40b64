"""What a compiler made of a program: read from the text of the compiled module."""
