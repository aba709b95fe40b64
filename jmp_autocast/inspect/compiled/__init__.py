"""What a compiler made of a program, read from the text of the compiled module.

hlo.py               text to instructions; names of dtypes
loops.py             how often a loop runs
runs.py              which instructions run by themselves, and how often
kernels.py           what a kernel is: a product, a cast, a copy or other; its cycles
products.py          matmuls and convolutions
places.py            scopes and source lines
sources.py           what a user may ask about
report.py            the report
explain_compiled.py  the function
"""
