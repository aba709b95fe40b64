"""The collectives of JAX, and what each device sends in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Collective(NamedTuple):
    """An exchange between devices.

    Args:
        compiled: What compilers call it.
        sent: What each of n devices sends of the bytes of its operand in a ring, which no algorithm
            beats in bytes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
    """

    compiled: str
    sent: Callable[[int], float]


_ALL_REDUCE = Collective("all-reduce", lambda n: 2 * (n - 1) / n)
COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {
        "psum": _ALL_REDUCE,
        "pmax": _ALL_REDUCE,
        "pmin": _ALL_REDUCE,
        "all_gather": Collective("all-gather", lambda n: n - 1),
        "reduce_scatter": Collective("reduce-scatter", lambda n: (n - 1) / n),
        "all_to_all": Collective("all-to-all", lambda n: (n - 1) / n),
        "ragged_all_to_all": Collective("ragged-all-to-all", lambda n: (n - 1) / n),
        "ppermute": Collective("collective-permute", lambda n: 1 if n > 1 else 0),
    }
)
"""The collectives by the primitives of JAX, which has other forms of most: see `collective_of`."""


def collective_of(primitive: str) -> str:
    """Returns the collective that a primitive is one form of, ``""`` where it is none.

    Args:
        primitive: The name of the primitive.

    Example:
        >>> collective_of("psum_invariant"), collective_of("all_gather_reduced_start")
        ('psum', 'all_gather')
        >>> collective_of("dot_general")
        ''
    """
    name = primitive.removeprefix("unreduced_").removesuffix("_start")
    name = name.removesuffix("_invariant").removesuffix("_reduced")
    return name if name in COLLECTIVES else ""
