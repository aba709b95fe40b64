"""Products in few bits, which another room plans.

The room registers itself; nothing here, in `plan` or in `rewrite` imports it. What it emits is an
`Emit` action, of products with copies of the operands.
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
        """Returns what plans a product in a region, None where the compute dtype holds.

        Args:
            name: What the policy says of the scope, "" where it says nothing.
        """
        ...


_PRODUCTS: list[Callable[[Policy], Products | None]] = []


def plans_products(room: Callable[[Policy], Products | None]) -> None:
    """Registers what a room makes of a policy: None where the policy asks nothing of it."""
    _PRODUCTS.append(room)


def products_of(policy: Policy) -> Products | None:
    """Returns what plans products under a policy, None where the compute dtype holds for all."""
    found = (room(policy) for room in _PRODUCTS)
    return next((products for products in found if products is not None), None)
