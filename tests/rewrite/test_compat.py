"""The adapters of `compat` for both forms of what JAX changed, whichever one is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast.interpreters import compat
from tests.support.jaxprs import find, trace

FLOAT0 = jax.dtypes.float0


def test_scan_counts_of_the_installed_jax():
    step = lambda carry, x: ((carry[0] * x, carry[1] + x), x)
    init = (jnp.ones(()), jnp.ones(2))
    (eqn,) = find(trace(lambda xs: lax.scan(step, init, xs), jnp.ones(3)), "scan")
    consts, carries = compat.scan_split(eqn.params)
    assert (consts, carries) == (0, 2)
    assert compat.scan_split(compat.scan_with_more(eqn.params, 3, 0)) == (3, 2)
    assert compat.scan_with_more(eqn.params, 0, 0) is eqn.params


def test_scan_counts_before_jax_0_11():
    params = {"num_consts": 1, "num_carry": 2, "length": 5}
    assert compat.scan_split(params) == (1, 2)
    assert compat.scan_with_more(params, 3, 0) == {"num_consts": 4, "num_carry": 2, "length": 5}


@pytest.mark.parametrize("name", ["manual_axes", "newly_manual_axes"])
def test_manual_axes_have_two_names(name):
    assert compat.shard_map_axes({name: frozenset("ij"), "jaxpr": None}) == {"i", "j"}


@pytest.mark.parametrize("key", ["jaxpr", "call_jaxpr", "fwd_jaxpr"])
def test_the_called_jaxpr_has_three_names(key):
    assert compat.inner_jaxpr_key({"name": "f", key: None}) == key


def test_a_jaxpr_with_constants_is_no_open_jaxpr():
    closed = trace(lambda x: x + np.ones(3, np.float32), jnp.ones(3))
    empty = trace(lambda x: x + x, jnp.ones(3))
    assert compat.open_jaxpr(empty) is compat.body_of(empty)
    assert len(compat.consts_of(closed)) == 1
    with pytest.raises(AssertionError, match="no constants"):
        compat.open_jaxpr(closed)


def test_a_call_without_shardings_gets_no_shardings():
    assert compat.call_with_operands({"name": "f"}, [0, 0]) == {"name": "f"}


@pytest.mark.parametrize(
    ("value", "dtype", "weak", "expected"),
    [
        (1.5, np.float32, True, float),
        (1.5, np.float16, True, np.float16),
        (2, np.int32, True, int),
        (2, np.float32, True, np.float32),
        (np.True_, np.bool_, False, np.bool_),
        (np.zeros((), FLOAT0), FLOAT0, False, np.ndarray),  # before JAX 0.10.2 a literal of its own
    ],
)
def test_literals_have_the_declared_dtype(value, dtype, weak, expected):
    aval = compat.ShapedArray((), np.dtype(dtype), weak_type=weak)
    found = compat.literal_value(compat.Literal(value, aval))
    assert type(found) is expected
    assert jax.typeof(found).dtype == dtype
