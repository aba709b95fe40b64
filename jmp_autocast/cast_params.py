"""`cast_params`: the parameters that a program reads in 16 bits alone, stored in 16 bits."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .autocast import Autocast, autocast
from .backend import EVERY_ROUNDING
from .call.arguments import check_function, is_array
from .call.fitting import of_a_call
from .call.switch import is_switched_off
from .interpreters.after.stored_reads import Read, read_dtypes
from .interpreters.compat import Tracer
from .interpreters.plan.float_dtypes import is_in
from .policies import PolicyLike, narrow_dtypes
from .policies.callables import name_of

T = TypeVar("T")


@of_a_call("cast_params(fn, params, *args)")
def cast_params(
    fn: Callable[..., Any],
    params: T,
    *args: Any,
    policy: PolicyLike | None = None,
    check: bool = False,
    donate: bool = False,
    **kwargs: Any,
) -> T:
    """Returns the parameters, with each leaf in 16 bits that the program reads only in 16 bits.

    A leaf is cast if all its readers, in every branch and loop, read it in one 16-bit dtype,
    according to the plan of `autocast`. A leaf that a norm, a comparison or a float32 residual
    stream reads in float32 stays float32, and so does a leaf that nothing reads. If you widen the
    leaves again, the program returns the same bits, because it rounds a rounded number to itself.
    Under ``jit`` XLA removes the widening together with the cast that follows it.

    Args:
        fn: The function in float32, or an `autocast` wrapper, whose options then apply. Its first
            argument holds the parameters.
        params: The parameters: any pytree of arrays, such as Linen variables, the state of
            ``nnx.split``, a Haiku or Equinox model, or what Orbax restores. For a
            ``jax.ShapeDtypeStruct`` only the dtype changes, for a restore in 16 bits. Shardings
            stay.
        *args: The other positional arguments of ``fn``, as arrays or ``jax.ShapeDtypeStruct``.
        policy: As for `autocast`; None for the wrapper's own, or the default.
        check: Also runs both programs on the arguments, and compares the bits of all results, where
            XLA rounds wherever the program says so. With ``xla_allow_excess_precision``, its
            default, XLA may leave out that rounding of a float32 weight; no stored weight lacks it.
        donate: Deletes each float32 leaf as soon as its 16-bit copy is made, so that memory never
            holds more than the tree and one leaf.
        **kwargs: The keyword arguments of ``fn``.

    Returns:
        A pytree of the structure of ``params``; with ``JMP_AUTOCAST=0`` in the environment
        ``params`` itself.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``fn`` is a wrapper, and ``policy`` is given as well or it has
            ``enabled=False``. With ``check``: an argument is abstract.
        AssertionError: With ``check``: the results differ, which is an error of this library or of
            the compiler.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, autocast, cast_params
        >>> from jmp_autocast.optimizers import as_float32
        >>> def apply(params, x):
        ...     x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)) * params["scale"]
        ...     return x @ params["w"]
        >>> params, x = {"scale": jnp.ones(8), "w": jnp.ones((8, 4)) / 3}, jnp.ones((2, 8))
        >>> small = cast_params(apply, params, x, policy=BF16, check=True)
        >>> {name: leaf.dtype.name for name, leaf in small.items()}
        {'scale': 'float32', 'w': 'bfloat16'}
        >>> predict = jax.jit(lambda params, x: autocast(apply, policy=BF16)(as_float32(params), x))
        >>> bool((predict(small, x) == predict(params, x)).all())
        True
    """
    check_function(fn, "cast_params", "Pass the function itself, then the parameters.")
    wrapper = wrapper_of_program(fn, policy, "cast_params")
    if is_switched_off():  # as the program reads them then
        return params
    leaves, structure = jax.tree.flatten(params)
    reads = reads_of_leaves(wrapper, params, args, kwargs)
    narrow = narrow_dtypes(wrapper.policy.wide_dtype)
    dtypes = [d if isinstance(d, np.dtype) and d in narrow else None for d in reads]
    if check:
        _check_bits(wrapper, structure, leaves, dtypes, args, kwargs)
    return structure.unflatten(each_once(leaves, dtypes, _cast, donate))


def wrapper_of_program(fn: Any, policy: Any, by: str) -> Autocast:
    """Returns the wrapper whose plan says how a function reads its parameters.

    Args:
        fn: The function, or a wrapper of it.
        policy: Its policy, None for the wrapper's own.
        by: The public function that takes both, for the message.

    Raises:
        ValueError: ``fn`` is a wrapper, and ``policy`` is given as well.
    """
    if not isinstance(fn, Autocast):
        return autocast(fn, policy=policy)
    if policy is not None:
        raise ValueError(
            f"{by} got policy= for a function that autocast has already wrapped with its "
            "own. Leave policy out, or pass the function that was wrapped."
        )
    return fn


def reads_of_leaves(wrapper: Autocast, params: Any, args: Any, kwargs: Any) -> list[Read | None]:
    """Returns the one way in which a program reads each float32 leaf of its first argument.

    Args:
        wrapper: The program.
        params: Its first argument.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        None for a leaf that is read in several ways, in none, or that is not float32.
    """
    leaves, structure = jax.tree.flatten(params)
    if not wrapper.inputs_are_leaves:
        # Its inputs have another order than the leaves, and what stands twice is one of them: they
        # are found by identity, which the types of arrays get here.
        leaves = [x.update() if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        params = structure.unflatten(leaves)
    planned = wrapper.planned(params, *args, **kwargs)
    plan, arrays = planned.plan, planned.call.arrays
    ways = [
        reads if is_in(state.dtype, plan.wide) else {None}
        for state, reads in zip(plan.inputs, read_dtypes(plan), strict=True)
    ]
    places = [i for i, x in enumerate(leaves) if is_array(x) or _is_abstract(x)]
    if wrapper.inputs_are_leaves:
        # The arrays among all leaves are the inputs, those of the first argument first.
        pairs = list(zip(places, ways, strict=False))
    else:
        pairs = [(i, ways[k]) for i in places for k, x in enumerate(arrays) if x is leaves[i]]
    found: dict[int, set[Read | None]] = {}
    for i, reads in pairs:
        found.setdefault(i, set()).update(reads)
    several = (found.get(i, set()) for i in range(len(leaves)))
    return [next(iter(reads)) if len(reads) == 1 else None for reads in several]


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def each_once(
    leaves: list[Any], reads: list[Any], store: Callable[[Any, Any], Any], donate: bool
) -> list[Any]:
    """Returns what is stored for each leaf, one object for an array that stands twice.

    Args:
        leaves: The leaves.
        reads: How each of them is read.
        store: From a leaf and how it is read to what is stored.
        donate: Each array is deleted as soon as what is stored in its place is computed, unless a
            leaf is stored as it is.
    """
    made: dict[Any, Any] = {}
    left, kept = collections.Counter(map(id, leaves)), set()
    for leaf, read in zip(leaves, reads, strict=True):
        if (id(leaf), read) not in made:
            made[id(leaf), read] = store(leaf, read)
        small = made[id(leaf), read]
        left[id(leaf)] -= 1
        if small is leaf:
            kept.add(id(leaf))
        elif donate and not left[id(leaf)] and id(leaf) not in kept:
            _delete_when_done(leaf, small)
    return [made[id(leaf), read] for leaf, read in zip(leaves, reads, strict=True)]


def _delete_when_done(leaf: Any, small: Any) -> None:
    """Deletes an array as soon as what is stored in its place is computed."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        jax.block_until_ready(small)
        leaf.delete()


def _cast(leaf: Any, dtype: np.dtype | None) -> Any:
    if dtype is None:
        return leaf
    return leaf.update(dtype=dtype) if _is_abstract(leaf) else leaf.astype(dtype)


def _check_bits(
    wrapper: Autocast,
    structure: Any,
    leaves: list[Any],
    dtypes: list[np.dtype | None],
    args: Any,
    kwargs: Any,
) -> None:
    """Runs the program on the parameters as they are and as they are stored, and compares."""
    static = {i: leaf for i, leaf in enumerate(leaves) if not is_array(leaf)}
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((leaves, args, kwargs))):
        raise ValueError("check=True runs the program, and needs arrays for all arguments.")

    def run(arrays: list[Any]) -> list[Any]:
        given = iter(arrays)
        full = [static[i] if i in static else next(given) for i in range(len(leaves))]
        out = wrapper(structure.unflatten(full), *args, **kwargs)
        return [x for x in jax.tree.leaves(out) if is_array(x)]

    def from_stored(arrays: list[Any]) -> list[Any]:
        return run([jnp.asarray(x, like) for x, like in zip(arrays, declared, strict=True)])

    arrays = [jnp.asarray(x) for i, x in enumerate(leaves) if i not in static]
    declared = [x.dtype for x in arrays]
    own = [d for i, d in enumerate(dtypes) if i not in static]
    small = [x if d is None else x.astype(d) for x, d in zip(arrays, own, strict=True)]
    # A rounding that XLA leaves out would tell the two apart.
    as_it_is = jax.jit(run, compiler_options=EVERY_ROUNDING)(arrays)
    stored = jax.jit(from_stored, compiler_options=EVERY_ROUNDING)(small)
    pairs = zip(as_it_is, stored, strict=True)
    differing = [i for i, pair in enumerate(pairs) if not _same_bits(*pair)]
    if differing:
        raise AssertionError(
            f"{name_of(wrapper)} returns other bits in its outputs {differing} with parameters in "
            "16 bits. Please report the program."
        )


def _same_bits(one: jax.Array, other: jax.Array) -> bool:
    if one.dtype != other.dtype:
        return False
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()
