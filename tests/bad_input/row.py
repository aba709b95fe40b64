"""What a wrong use must leave as it was, and the form of a row of the tables."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jmp_autocast import BF16, FP16, CastPolicy, autocast, dynamic_loss_scaling
from jmp_autocast.integrations import flax_compat, nnx_scopes
from jmp_autocast.interpreters import compat
from jmp_autocast.policies import DEFAULT_RULES, registry

X = np.ones((2, 2), np.float32)


class Row:
    """One wrong use.

    Args:
        public: The public name that is used wrongly.
        mistake: What is wrong.
        call: Does it, given all that exists before.
        error: What is raised.
        parts: Regular expressions that the message has to match, for "argument | value | rule |
            fix", in one text or in several. A list of what is allowed is both the rule and the fix.
    """

    def __init__(
        self,
        public: str,
        mistake: str,
        call: Callable[["World"], Any],
        error: type[Exception],
        *parts: str,
    ) -> None:
        self.public, self.mistake, self.call, self.error = public, mistake, call, error
        self.parts = " | ".join(parts).split(" | ")
        assert len(self.parts) == 4, self.parts

    def __str__(self) -> str:
        return f"{self.public}: {self.parts[0]}: {self.mistake}"


def rows(error, table):
    """The rows of a table of one error: by "public name: mistake" what is called, and the parts."""
    return [
        Row(*name.split(": ", 1), call, error, *parts) for name, (call, *parts) in table.items()
    ]


class Counting(nnx.Module):
    """Its call changes its state."""

    def __init__(self):
        self.dense = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.kept = None

    def __call__(self, x):
        self.calls[...] += 1
        return self.dense(x)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def loss_at_call(params, x):
    """For what is wrong first at the call: a wrapper that was made stays with its function."""
    return loss(params, x)


class World:
    """All that exists before a wrong use."""

    def __init__(self):
        self.params = {"w": jnp.ones((2, 2))}
        self.grads = {"w": jnp.full((2, 2), 2.0)}
        self.tx = dynamic_loss_scaling(optax.adam(1e-3))
        self.opt_state = self.tx.init(self.params)
        self.model = Counting()
        self.policy = BF16.with_rules({"tanh": CastPolicy.FP32}).with_rules(
            {"*": "float32"}, scope="*/ln"
        )

    def snapshot(self):
        """Everything that a wrong use could leave half-done, comparable with ``==``."""
        trees = (self.params, self.grads, self.opt_state, nnx.state(self.model))
        return {
            "arrays": [_bits(leaf) for leaf in jax.tree.leaves(trees)],
            "structures": [jax.tree.structure(tree) for tree in trees],
            "module": (nnx.graphdef(self.model), self.model.kept, vars(Counting)["__call__"]),
            "patched classes": dict(flax_compat._patched),
            "scope stack": getattr(nnx_scopes._local, "stack", None),
            "registry": dict(registry._registered),
            "tables": dict(DEFAULT_RULES),
            "policies": [(repr(p), hash(p)) for p in (BF16, FP16, self.policy)],
            "wrappers": {name: list(value) for name, value in vars(loss).items()},
            "name stack": str(compat.current_name_stack()),
            "trace": isinstance(jnp.ones(()) + 1, compat.Tracer),
            "promotion": jax.config.jax_numpy_dtype_promotion,
        }

    def program(self):
        """What a right use gives."""
        fn = autocast(lambda params, x: loss(params, x), policy=self.policy)
        with warnings.catch_warnings(action="ignore"):  # nothing is in the policy's scope
            return str(jax.make_jaxpr(jax.grad(fn))(self.params, X))


@functools.cache
def world():
    return World()


def _bits(leaf):
    return np.asarray(leaf).dtype.name, np.shape(leaf), np.asarray(leaf).tobytes()
