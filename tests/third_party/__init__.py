"""Programs made of other packages' models and functions, for which the library was not tuned.

One module for each source holds a table of `Program`; `test_third_party.py` runs them all. With
``python -m tests.third_party`` every program runs in both compute dtypes, and the errors are
printed.
"""
