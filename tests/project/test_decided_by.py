"""A dtype is decided by few functions in few files: a reader can follow it."""

from .decided_by import of_a_bias


def test_few_functions_decide_the_dtype_of_a_sum():
    # A ratchet: whoever needs fewer lowers it. The aim is 22 in 9.
    functions, files = of_a_bias()
    assert (len(functions) <= 32, files <= 11) == (True, True), "\n".join(functions)
