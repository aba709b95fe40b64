"""Finds the matrix products whose results reach no other product, such as a model's head."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..interpreters.compat import AnyJaxpr, JaxprEqn, body_of, name_stack, variables_in
from ..interpreters.primitives.reading import free_dimensions
from ..interpreters.primitives.structure import Body, bodies


def last_products(jaxpr: AnyJaxpr) -> frozenset[int]:
    """Returns the ids of the equations of matrix products whose results reach no other product.

    Products of a backward pass do not count, so that the head of a model is also last under
    ``jax.grad``. If a jaxpr is called several times, an equation in it is last if it is last in
    each call.

    Args:
        jaxpr: The jaxpr of the whole program. Keep it alive while the ids are in use.
    """
    products: set[int] = set()
    followed: set[int] = set()
    body = body_of(jaxpr)
    _visit(body, [False] * len(body.outvars), products, followed)
    return frozenset(products - followed)


def _visit(
    jaxpr: AnyJaxpr, outputs: Sequence[bool], products: set[int], followed: set[int]
) -> list[bool]:
    """Visits the equations of a jaxpr in reverse; returns whether each input reaches a product.

    Args:
        jaxpr: An open jaxpr.
        outputs: Whether each output reaches a later product.
        products: The ids of visited products are added to this set.
        followed: The ids of products whose results reach another product are added to this set.
    """
    live = set(variables_in(itertools.compress(jaxpr.outvars, outputs)))
    for eqn in reversed(jaxpr.eqns):
        is_live = any(v in live for v in eqn.outvars)
        if _is_product(eqn):
            products.add(id(eqn))
            if is_live:
                followed.add(id(eqn))
            live.update(variables_in(eqn.invars))
        elif held := bodies(eqn):
            if "transpose(" in name_stack(eqn):
                continue
            for body in held:
                inside = _around(body, [v in live for v in eqn.outvars], products, followed)
                operands = [eqn.invars[i] for i in body.operands]
                live.update(variables_in(itertools.compress(operands, inside)))
        elif is_live:
            live.update(variables_in(eqn.invars))
    return [v in live for v in jaxpr.invars]


def _around(
    body: Body, results: Sequence[bool], products: set[int], followed: set[int]
) -> list[bool]:
    """Returns whether each input of a body reaches a product in this or a later iteration."""
    outputs = [r is not None and results[r] for r in body.results]
    jaxpr = body_of(body.jaxpr)
    while True:
        inputs = _visit(jaxpr, outputs, products, followed)
        # If the input of a carry reaches a product, the output of the carry reaches this product
        # in the next iteration.
        again = [k for i, k in body.carries if inputs[i] and not outputs[k]]
        if not again:
            return inputs
        for k in again:
            outputs[k] = True


def _is_product(eqn: JaxprEqn) -> bool:
    if "transpose(" in name_stack(eqn):
        return False
    return free_dimensions(eqn) not in (None, (0, 0))
