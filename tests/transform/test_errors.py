"""Mistakes of a caller: each message names the argument, the value and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive

from jmp_autocast import (
    CastPolicy,
    autocast,
    register_policy,
)

X = np.ones((2, 2), np.float32)


def test_wrong_params_are_told_when_wrapped():
    """And not first at the call, where the signature is known."""
    for wrong in (3, -4, (0, 3)):
        with pytest.raises(ValueError, match="out of range: rms_norm takes 3 positional"):
            autocast(rms_norm, params=wrong)
    assert autocast(rms_norm, params=(0, 2, -1))


def rms_norm(scale, x, eps=1e-6):
    return scale * x * lax.rsqrt(jnp.mean(x * x) + eps)


# --- primitives without a rule --------------------------------------------------------------

mystery = Primitive("test_errors_mystery")
mystery.def_abstract_eval(lambda x: x)
mystery.def_impl(lambda x: x)


def two_mysteries(x):
    return mystery.bind(x @ x) + mystery.bind(x)


def in_a_jit(x):
    return jax.jit(mystery.bind)(x @ x)


def test_an_unknown_primitive_is_kept_in_silence_by_default():
    autocast(two_mysteries)(X)


MESSAGE = (
    "{} holds primitives without a cast policy: test_errors_mystery. .*declared dtypes"
    ".*register_policy or Policy.with_rules"
)


def test_an_unknown_primitive_can_warn():
    with pytest.warns(UserWarning, match=MESSAGE.format("two_mysteries")) as caught:
        autocast(two_mysteries, on_unknown="warn")(X)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_an_unknown_primitive_can_be_an_error():
    fn = autocast(in_a_jit, on_unknown="error")
    with pytest.raises(ValueError, match=MESSAGE.format("in_a_jit")):
        jax.make_jaxpr(fn)(X)
    register_policy(mystery, CastPolicy.PROMOTE)
    jax.make_jaxpr(fn)(X)


# --- modules that change while they are traced ----------------------------------------------


class Norm(nnx.Module):
    """Counts its calls, as batch statistics and RNG counters do."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones((2, 2)))
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        return x @ self.weight.get_value()


def call_module(module, x):
    return module(x)


def call_in_a_tree(tree, x):
    return tree["layers"][0](x)


CHANGES = {
    "argument": ("call_module", "Norm", lambda m: autocast(call_module)(m, X)),
    "in_a_tree": ("call_in_a_tree", "Norm", lambda m: autocast(call_in_a_tree)({"layers": [m]}, X)),
    "callable_object": ("Norm", "Norm", lambda m: autocast(m)(X)),
    "bound_method": ("__call__", "Norm", lambda m: autocast(m.__call__)(X)),
    "closure": ("<lambda>", "an NNX module", lambda m: autocast(lambda x: m(x))(X)),
    "under_jit": ("<lambda>", "an NNX module", lambda m: jax.jit(autocast(lambda x: m(x)))(X)),
}


@pytest.mark.parametrize(("name", "module", "call"), CHANGES.values(), ids=CHANGES)
def test_a_module_that_changes_is_refused(name, module, call):
    """Its change would be lost in silence."""
    model = Norm()
    message = (
        f"{name} changes the state of {module} .*would be lost.*"
        "jmp_autocast.integrations.nnx.autocast.*return the new state"
    )
    with pytest.raises(TypeError, match=message):
        call(model)
    assert model.count.get_value() == 0


def test_a_module_that_does_not_change_is_fine():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for fn in (lambda m, x: m(x), lambda m, x: autocast(lambda x: m(x))(x)):
        assert autocast(fn)(model, X).dtype == jnp.float32
