"""Programs made of other packages' models and functions, for which the library was not tuned.

One module for each source holds a table of `Program`; `test_others.py` runs them all. With
``python -m tests.others`` every program runs in both compute dtypes, and the errors are printed.
"""
