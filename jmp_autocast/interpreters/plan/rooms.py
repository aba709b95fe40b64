"""Products in few bits, which an extension plans.

The extension registers itself; nothing in `plan` or `rewrite` imports it. Its action is an `Emit`
of products with copies of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...policies import Policy
from ..compat import AnyJaxpr
from ..regions import PlansProduct
from .copies import Tag


class Products(Protocol):
    """Plans the products of one program."""

    @property
    def tag(self) -> Tag:
        """The tag of the program's parameters."""
        ...

    def look_at(self, jaxpr: AnyJaxpr) -> None:
        """Sees the program before it is planned; its jaxpr lives as long as this."""
        ...

    def in_scope(self, name: str) -> PlansProduct | None:
        """Returns the planning function of products in a region, None for the compute dtype.

        Args:
            name: The policy's choice for the scope, "" without one.
        """
        ...


_PRODUCTS: list[Callable[[Policy], Products | None]] = []


def plans_products(room: Callable[[Policy], Products | None]) -> None:
    """Registers an extension: a function of a policy, None if the policy does not use it."""
    _PRODUCTS.append(room)


def products_of(policy: Policy) -> Products | None:
    """Returns the planner of products under a policy, None if all are in the compute dtype."""
    found = (room(policy) for room in _PRODUCTS)
    return next((products for products in found if products is not None), None)
