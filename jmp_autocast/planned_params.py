"""The uses of each parameter in a planned program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .autocast import Autocast, PlannedCall
from .call.arguments import is_array
from .interpreters.plan.data import Plan, ValueState
from .interpreters.plan.reads import Read, read_dtypes
from .policies import FLOAT32


class PlannedParams:
    """A planned call of a program, and the input that each leaf of its first argument becomes.

    Args:
        wrapper: The program.
        params: The first argument.
        args: The other positional arguments.
        kwargs: The keyword arguments.

    Raises:
        ValueError: The wrapper is not enabled.
    """

    def __init__(
        self, wrapper: Autocast, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        leaves, structure = jax.tree.flatten(params)
        is_by_place = wrapper.inputs_are_leaves
        if not is_by_place:
            # The inputs are in another order than the leaves, and a shared array is one input. So
            # leaves and inputs are matched by identity. Abstract leaves are copied first, because
            # one `jax.ShapeDtypeStruct` may stand for several parameters.
            leaves = [x.update() if is_abstract(x) else x for x in leaves]
        self.planned: PlannedCall = wrapper.planned(structure.unflatten(leaves), *args, **kwargs)
        self._count = len(leaves)
        arrays = self.planned.call.arrays
        places = [i for i, x in enumerate(leaves) if is_array(x) or is_abstract(x)]
        # Each entry holds the position of a leaf, and the position of the input that the leaf
        # becomes. If `is_by_place`, the arrays among the leaves are the first inputs, in order.
        self._entries: list[tuple[int, int]] = (
            [(i, k) for k, i in enumerate(places)]
            if is_by_place
            else [(i, k) for i in places for k, x in enumerate(arrays) if x is leaves[i]]
        )

    def plan_for(self, inputs: Callable[[Sequence[ValueState]], Sequence[ValueState]]) -> Plan:
        """Plans the program again, with the inputs' `ValueState`s changed by ``inputs``."""
        planned, plan = self.planned, self.planned.plan
        return planned.planner.plan_program(planned.closed, inputs(plan.inputs), plan.requests)

    def reads(self, plan: Plan) -> list[Read | None]:
        """Returns how all consumers read each leaf, such as in one 16-bit dtype.

        The result is None for a leaf that is not float32, that nothing reads, or that consumers
        read in different ways.
        """
        ways = read_dtypes(plan)
        found: list[set[Read | None]] = [set() for _ in range(self._count)]
        for i, k in self._entries:
            found[i] |= ways[k] if plan.inputs[k].dtype == FLOAT32 else {None}
        return [next(iter(reads)) if len(reads) == 1 else None for reads in found]


def is_abstract(leaf: Any) -> bool:
    """Returns whether a leaf is a ``jax.ShapeDtypeStruct``."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def each_once(leaves: list[Any], reads: list[Any], store: Callable[[Any, Any], Any]) -> list[Any]:
    """Returns the stored form of each leaf. Leaves that are one array share one stored object.

    Args:
        leaves: The leaves.
        reads: The use of each leaf.
        store: A function from a leaf and its use to the stored leaf.
    """
    made: dict[Any, Any] = {}
    for leaf, read in zip(leaves, reads, strict=True):
        if (id(leaf), read) not in made:
            made[id(leaf), read] = store(leaf, read)
    return [made[id(leaf), read] for leaf, read in zip(leaves, reads, strict=True)]
