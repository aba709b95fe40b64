"""What rounding each operation to 16 bits does to a program's results, from one backward pass."""
