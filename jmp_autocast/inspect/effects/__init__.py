"""The effect of rounding each operation to 16 bits on a program's results, in one backward pass."""
