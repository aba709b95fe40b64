"""The fuzzer finds each kind of harm once its row is taken out, and nothing before, on values."""

import pytest

from .taken_out import TAKEN_OUT, first_found


@pytest.mark.parametrize("kind", TAKEN_OUT)
def test_values_show_a_row_that_is_taken_out(kind):
    found = first_found(kind, range(12), TAKEN_OUT[kind])
    assert found is not None
    assert first_found(kind, range(found + 1), None) is None
