"""`stateless`: converts a function of an NNX module to one of dicts of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from ..call.arguments import name_of, same_objects
from .flax_compat import raw_value


def stateless(
    fn: Callable[..., Any], module: Any
) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Returns a function of an NNX module as a pure function of its arrays, and the arrays.

    ``jax.export`` serializes no NNX module or state: it takes dicts with strings for keys. A server
    holds such dicts, and so do safetensors and NumPy's ``.npz`` files.

    Args:
        fn: A function whose first argument is the module, such as one in `autocast`. It may change
            all of the module's state but its parameters.
        module: The module, in the mode (``module.eval()``) and with the caches of the calls. It is
            not changed. Its parameters may be stored in 16 or 8 bits.

    Returns:
        The function ``(params, state, *args, **kwargs) -> (result, state)``; the values of every
        ``nnx.Param`` by its path, such as ``"layers/0/kernel"``; and those of all other variables,
        such as caches, statistics and counters.

    Raises:
        TypeError: When called, if ``fn`` changes a parameter.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jmp_autocast import BF16
        >>> from jmp_autocast.integrations.nnx import autocast, stateless
        >>> class Count(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        ...         self.calls = nnx.Cache(jnp.array(0))
        ...
        ...     def __call__(self, x):
        ...         self.calls[...] += 1
        ...         return self.layers[0](x)
        >>> step = autocast(lambda net, x: net(x), policy=BF16)
        >>> fn, params, state = stateless(step, Count(nnx.Rngs(0)))
        >>> sorted(params), sorted(state)
        (['layers/0/bias', 'layers/0/kernel'], ['calls'])
        >>> y, state = jax.jit(fn)(params, state, jnp.ones((2, 8)))
        >>> y.shape, int(state["calls"])
        ((2, 8), 1)
    """
    graphdef, state = nnx.split(module)
    variables = dict(_named(state))

    def run(
        params: dict[str, Any], state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        given = {**params, **state}
        flat = [(path, v.replace(given[name])) for name, (path, v) in variables.items()]
        net = nnx.merge(graphdef, nnx.from_flat_state(flat))
        out = fn(net, *args, **kwargs)
        after = dict(_named(nnx.state(net)))
        for name, value in params.items():
            if not same_objects(raw_value(after[name][1]), value):
                raise TypeError(
                    f"{name_of(fn)} changes the parameter {name!r}, and stateless(fn, module) "
                    "returns no parameters. Hold changing values in another nnx.Variable, such as "
                    "nnx.Cache, or train with nnx.Optimizer."
                )
        return out, {name: raw_value(v) for name, (_, v) in after.items() if name not in params}

    values = {name: (v, raw_value(v)) for name, (_, v) in variables.items()}
    params = {name: x for name, (v, x) in values.items() if isinstance(v, nnx.Param)}
    return run, params, {name: x for name, (_, x) in values.items() if name not in params}


def _named(state: Any) -> list[tuple[str, Any]]:
    """Returns the path for users, the path in Flax, and the variable of each part of a state."""
    return [("/".join(map(str, path)), (path, v)) for path, v in nnx.to_flat_state(state)]
