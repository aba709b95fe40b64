"""Plans which values a jaxpr keeps for its backward pass, by a minimum cut.

choice.py    the user's choice of residuals
graph.py     a jaxpr as a graph of values and steps
cut.py       the values that are kept, and the values that are computed again
segments.py  the segments, each one `jax.checkpoint`, and the order of the program
equal.py     equal segments, which share one function
emit.py      the emission of the program
"""
