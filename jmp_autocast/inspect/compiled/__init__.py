"""What a compiler made of a program, read from the text of the compiled module.

hlo.py               text to instructions; names of dtypes
loops.py             how often a loop runs
traffic.py           the kernels that run, the bytes that they move, and which only convert
products.py          matmuls and convolutions
calls.py             kernels whose inside the text does not show
collectives.py       what devices exchange
arithmetic.py        all FLOPs, as XLA counts them
memory.py            what the program holds
places.py            scopes and source lines
sources.py           what a user may ask about
targets.py           compilers for devices that are not there
report.py            the report
against_plan.py      planned against made
beside.py            the page of a plan with what was made of it
explain_compiled.py  the function
"""
