"""The fuzzer's programs for hypothesis, which draws the number and the size of a program."""

import hypothesis
import hypothesis.strategies as st

from . import campaign
from .properties import Case


def examples(n):
    """So many examples. A first one takes long, as what it traces is new to JAX."""
    return hypothesis.settings(
        max_examples=n, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )


def cases(size=9, without=()):
    """Cases of programs of up to ``size`` statements that hold none of some texts.

    A test runs one under `program.jax_settings`, as it was drawn.
    """

    def case(drawn) -> Case:
        index, statements = drawn
        return campaign.make_case(0, index, (1, statements))[0]

    found = st.tuples(st.integers(0, 9999), st.integers(1, size)).map(case)
    return found.filter(lambda case: not any(text in case.program.text() for text in without))
