"""Wrong uses of the public API, by room; `tests/test_bad_input.py` runs them."""
