"""Tools that run a program and measure its values: `check_numerics` and `compare`."""
