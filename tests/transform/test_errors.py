"""Mistakes of a caller: each message names the argument, the value and what to do instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import autocast

X = np.ones((8, 8), np.float32)


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
