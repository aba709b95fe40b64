"""`explain`: the dtype and the reason of each equation, and totals."""
