"""Wrong uses of the public API, by room; `tests/bad_input/test_bad_input.py` runs them."""
