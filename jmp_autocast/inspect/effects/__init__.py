"""Measures, in one backward pass, how rounding each operation to 16 bits changes the results."""
