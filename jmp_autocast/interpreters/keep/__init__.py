"""Plans by a minimum cut which values any jaxpr keeps for its backward pass.

choice.py    the user's choice of residuals
graph.py     a jaxpr as values and steps, with the operands of each derivative
cut.py       which values are kept, and which are computed again
segments.py  which steps become one `jax.checkpoint`, and in which order all is emitted
equal.py     which segments are one function
emit.py      the program, with its segments
"""
