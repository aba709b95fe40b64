"""The uses of each parameter in a planned program, and runs with other parameters."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from .autocast import Autocast, PlannedCall
from .backend import EVERY_ROUNDING
from .call.arguments import is_array
from .interpreters.after.stored_reads import Read, read_dtypes
from .interpreters.compat import Tracer
from .interpreters.plan.data import ValueState
from .policies import FLOAT32
from .policies.callables import name_of


class PlannedParams:
    """A planned call of a program, and the inputs that are leaves of its first argument.

    Args:
        wrapper: The program.
        by: The public function, for messages.
        params: The first argument.
        args: The other positional arguments.
        kwargs: The keyword arguments.
        declared: From a leaf to the leaf for which the program is planned.

    Raises:
        ValueError: The wrapper is not enabled.
    """

    def __init__(
        self,
        wrapper: Autocast,
        by: str,
        params: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        declared: Callable[[Any], Any] | None = None,
    ) -> None:
        self._by: str = by
        self.leaves: list[Any] = jax.tree.leaves(params)
        self.structure: Any = jax.tree.structure(params)
        leaves = list(map(declared, self.leaves)) if declared else self.leaves
        is_by_place = wrapper.inputs_are_leaves
        if not is_by_place:
            # The inputs have another order than the leaves, and a shared leaf is one input: they
            # are found by identity, for which abstract leaves are copied.
            leaves = [x.update() if is_abstract(x) else x for x in leaves]
        self.planned: PlannedCall = wrapper.planned(
            self.structure.unflatten(leaves), *args, **kwargs
        )
        arrays = self.planned.call.arrays
        places = [i for i, x in enumerate(leaves) if is_array(x) or is_abstract(x)]
        # The arrays among all leaves are the inputs, those of the first argument first.
        self._entries: list[tuple[int, int]] = (
            [(i, k) for k, i in enumerate(places)]
            if is_by_place
            else [(i, k) for i in places for k, x in enumerate(arrays) if x is leaves[i]]
        )

    def known(self, inputs: Callable[[Sequence[ValueState]], Sequence[ValueState]]) -> Self:
        """Returns the program, planned for the input states that ``inputs`` returns."""
        planned = self.planned
        states = inputs(planned.plan.inputs)
        plan = planned.planner.plan_program(planned.closed, states, planned.plan.requests)
        other = copy.copy(self)
        other.planned = dataclasses.replace(planned, plan=plan)
        return other

    def reads(self) -> list[Read | None]:
        """Returns the use of each float32 leaf, None for several uses, none, or another dtype."""
        plan = self.planned.plan
        ways = read_dtypes(plan)
        found: list[set[Read | None]] = [set() for _ in self.leaves]
        for i, k in self._entries:
            found[i] |= ways[k] if plan.inputs[k].dtype == FLOAT32 else {None}
        return [next(iter(reads)) if len(reads) == 1 else None for reads in found]

    def outputs(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Runs the program: its results, and the state that it changed.

        Args:
            leaves: Values for the leaves of the parameters; they are widened in the program.

        Raises:
            ValueError: An argument has no values.
        """
        arrays = list(self.planned.call.arrays)
        dtypes = [x.dtype if hasattr(x, "dtype") else None for x in arrays]
        for i, k in self._entries:
            arrays[k] = leaves[i]
        if any(map(is_abstract, arrays)):
            raise ValueError(
                f"{self._by}(check=True) runs the program, and needs arrays for all arguments. "
                "Pass arrays in place of types, or leave check out."
            )

        def run(given: list[Any]) -> list[Any]:
            pairs = zip(given, dtypes, strict=True)
            wide = [x if d in (None, x.dtype) else jnp.asarray(x, d) for x, d in pairs]
            return self.planned.rewritten(*wide)

        # If XLA left out a rounding, equal programs would have different results.
        return jax.jit(run, compiler_options=EVERY_ROUNDING)(arrays)


def check_equal(
    fn: Any, found: Sequence[jax.Array], expected: Sequence[jax.Array], stored_in: str
) -> None:
    """Raises AssertionError where two runs of a program have other bits.

    Args:
        fn: The program.
        found: Its results with stored parameters.
        expected: Its results with the original parameters.
        stored_in: The format of the stored parameters, in words.
    """
    pairs = enumerate(zip(found, expected, strict=True))
    if differing := [i for i, pair in pairs if not _same_bits(*pair)]:
        raise AssertionError(
            f"{name_of(fn)} returns other bits in its outputs {differing} with parameters in "
            f"{stored_in}. Please report the program."
        )


def is_abstract(leaf: Any) -> bool:
    """Returns whether a leaf is the type of an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def each_once(
    leaves: list[Any], reads: list[Any], store: Callable[[Any, Any], Any], donate: bool
) -> list[Any]:
    """Returns the stored form of each leaf, one object for a shared array.

    Args:
        leaves: The leaves.
        reads: The use of each of them.
        store: From a leaf and its use to the stored leaf.
        donate: Whether each array is deleted as soon as its stored form is computed, if it differs.
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
    """Deletes an array as soon as its stored form is computed."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        jax.block_until_ready(small)
        leaf.delete()


def _same_bits(one: jax.Array, other: jax.Array) -> bool:
    if one.dtype != other.dtype:
        return False
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()
