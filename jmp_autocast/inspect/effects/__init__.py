"""What rounding each operation does to a loss, from one backward pass."""
