"""Forward passes of the models of the benchmarks, with parameters to store.

Their folder is on the path while `tests.support.scripts.run_from` holds it there.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import Policy, autocast, cast_params
from jmp_autocast.backend import EVERY_ROUNDING


class Program(NamedTuple):
    """A forward pass.

    Attributes:
        fn: From parameters and other arguments to what inference returns.
        params: The parameters.
        args: The other arguments.
    """

    fn: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]


@functools.cache
def programs(size: str) -> dict[str, Program]:
    """Returns the program of each model of the benchmarks, by name."""
    from comparison.cases import SIZES, forward

    found = {}
    for case in SIZES[size]:
        model, (params, batch) = case.build(), case.examples(1)[0]
        fn = functools.partial(lambda model, params, batch: forward(model, params, batch)[0], model)
        found[case.name] = Program(fn, params, (batch,))
    return found


def shaken(params: Any) -> Any:
    """Returns parameters of which none is 0 or 1: those are the same number in 16 bits."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + np.float32(0.1) * rng.standard_normal(x.shape, np.float32), params
    )


def needless(program: Program, policy: Policy) -> Iterator[str]:
    """Yields the names of leaves that are in 16 bits by hand alone, and need not be in float32.

    The program returns the same bits where such a leaf is rounded.
    """
    wrapper = autocast(program.fn, policy=policy)
    run = jax.jit(wrapper, compiler_options=EVERY_ROUNDING)
    exact = jax.tree.leaves(run(program.params, *program.args))
    stored = jax.tree.leaves(cast_params(wrapper, program.params, *program.args))
    paths, structure = jax.tree_util.tree_flatten_with_path(program.params)
    for i, (path, _) in enumerate(paths):
        if stored[i].dtype == jnp.float32 and "norm" not in jax.tree_util.keystr(path).lower():
            leaves = [leaf for _, leaf in paths]
            leaves[i] = jnp.float32(jnp.asarray(leaves[i], policy.compute_dtype))
            found = jax.tree.leaves(run(structure.unflatten(leaves), *program.args))
            if all(np.array_equal(a, b) for a, b in zip(exact, found, strict=True)):
                yield jax.tree_util.keystr(path, simple=True, separator="/")
