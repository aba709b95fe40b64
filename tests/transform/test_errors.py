"""Mistakes of a caller: each message names the argument, the value and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jmp_autocast import autocast

X = np.ones((8, 8), np.float32)


def test_wrong_params_are_told_when_wrapped():
    """And not first at the call, where the signature is known."""
    for wrong in (3, -4, (0, 3)):
        with pytest.raises(ValueError, match="out of range: rms_norm takes 3 positional"):
            autocast(rms_norm, params=wrong)
    assert autocast(rms_norm, params=(0, 2, -1))


def rms_norm(scale, x, eps=1e-6):
    return scale * x * lax.rsqrt(jnp.mean(x * x) + eps)


# --- modules that change while they are traced ----------------------------------------------


class Norm(nnx.Module):
    """Counts its calls, as batch statistics and RNG counters do."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones((8, 8)))
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
