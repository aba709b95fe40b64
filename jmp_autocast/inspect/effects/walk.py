"""Runs a program once more, and does something at each of its sites.

`Tapped` measures: what each site returns goes through a function whose derivative rule takes the
cotangent. As the gradient of an array of zeros, which the function takes beside the value, the rule
returns what the rounding of this equation does to the loss. So nothing but a few numbers outlives
the backward pass of a site, and a loop returns them by iteration. The errors themselves are
computed in the backward pass: none is kept for it.

`Lowered` rounds: a site computes in a format where a number that is given says so.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ...interpreters.compat import (
    AnyJaxpr,
    JaxprEqn,
    Literal,
    bound,
    consts_of,
    device_varying,
    fresh_make_jaxpr,
    literal_value,
    varying_axes,
)
from ...interpreters.primitives.evaluate import evaluate, of_positions
from ...interpreters.primitives.structure import (
    Copy,
    bodies,
    rebound,
    runs_again,
    scan_direction,
    shard_map_options,
)
from .number_format import Format
from .rounding import is_float, is_product, lowered, narrowed
from .sites import Site, Sites

NUMBERS = 3
"""What is measured of a site in a format: the change of the loss, the sum of the squares of its
parts, and how many elements are finite in float32 alone."""


class Walk(abc.ABC):
    """A run of a program that does something at each site.

    Args:
        formats: The formats.
    """

    def __init__(self, formats: Sequence[Format]) -> None:
        self.formats: tuple[Format, ...] = tuple(formats)

    @abc.abstractmethod
    def at(self, eqn: JaxprEqn, operands: Sequence[Any], held: Any) -> list[Any]:
        """Returns the results of an equation that is a site.

        Args:
            eqn: The equation.
            operands: Its operands.
            held: What is given for it.
        """

    def run(
        self, jaxpr: AnyJaxpr, sites: Sites, arrays: Sequence[Any], held: Mapping[int, Any]
    ) -> list[Any]:
        """Returns the outputs of a jaxpr.

        Args:
            jaxpr: The jaxpr.
            sites: Its sites.
            arrays: Its inputs.
            held: A tree of the form of the sites; a leaf of a site in loops has their lengths as
                its first dimensions.
        """

        def step(i: int, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            found = sites.at.get(i)
            if found is None:
                return bound(eqn, operands)
            if isinstance(found, Site):
                return self.at(eqn, operands, held[i])
            return self._inside(eqn, found, operands, held[i])

        return evaluate(jaxpr, consts_of(jaxpr), arrays, literal_value, step)

    def _inside(
        self, eqn: JaxprEqn, inner: Sequence[Sites], operands: list[Any], held: Any
    ) -> Sequence[Any]:
        found = bodies(eqn)
        if eqn.primitive.name == "cond":
            branches = [
                lambda held, args, k=k: self.run(found[k].jaxpr, inner[k], args, held[k])
                for k in range(len(found))
            ]
            return lax.switch(operands[0], branches, held, operands[1:])
        (body,), (sites,), (held,) = found, inner, held
        if eqn.primitive.name == "scan":
            fixed, carries = operands[: body.fixed], len(body.carries)
            start, scanned = (operands[body.fixed :][:carries], operands[body.fixed :][carries:])

            def step(carry: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
                xs, of_iteration = slices
                made = self.run(body.jaxpr, sites, [*fixed, *carry, *xs], of_iteration)
                return made[:carries], made[carries:]

            last, stacked = lax.scan(step, start, (scanned, held), **scan_direction(eqn))
            return [*last, *stacked]
        if eqn.primitive.name == "shard_map":
            options = shard_map_options(eqn)
            # What is given is the same on all devices: its gradient is the sum over them.
            options["in_specs"] = options["in_specs"], PartitionSpec()
            inside = lambda args, held: tuple(self.run(body.jaxpr, sites, args, held))  # noqa: E731
            return list(jax.shard_map(inside, **options)(tuple(operands), held))
        if runs_again(eqn) and eqn.primitive.name != "remat_opt":
            return self._checkpoint(eqn, body.jaxpr, sites, operands, held)
        return self.run(body.jaxpr, sites, operands, held)

    def _checkpoint(
        self, eqn: JaxprEqn, jaxpr: AnyJaxpr, sites: Sites, operands: list[Any], held: Any
    ) -> Sequence[Any]:
        """Binds a checkpoint: its backward pass computes again what the user's would."""
        leaves, tree = jax.tree.flatten(held)
        count = len(operands)

        def run(*arrays: Any) -> list[Any]:
            given = jax.tree.unflatten(tree, arrays[count:])
            return self.run(jaxpr, sites, arrays[:count], given)

        closed = fresh_make_jaxpr(run, *map(jax.typeof, (*operands, *leaves)))
        more = [Copy(0, leaf) for leaf in leaves]
        args, params = rebound(eqn, operands, [closed], [more])
        return eqn.primitive.bind(*args, **params)


class Tapped(Walk):
    """Measures what the rounding of each site does, where its cotangent is made.

    `held` has an array of zeros of ``(formats, NUMBERS)`` for each site. Its gradient is what was
    measured.
    """

    def at(self, eqn: JaxprEqn, operands: Sequence[Any], held: Any) -> list[Any]:
        """Returns the results, through the function whose derivative rule measures."""
        results = bound(eqn, operands)
        floats = [k for k, x in enumerate(results) if is_float(x)]
        values = [results[k] for k in floats]
        kept = _kept(eqn, operands, values)
        # In a device map each device has its own part of the numbers.
        held = device_varying(held, frozenset().union(*map(varying_axes, values)))
        for k, x in zip(floats, _tap(eqn, self.formats)(held, kept, values), strict=True):
            results[k] = x
        return results


def _kept(eqn: JaxprEqn, operands: Sequence[Any], values: list[Any]) -> list[Any]:
    """Returns what is kept of a site for the backward pass: as for the derivative of a product."""
    if not is_product(eqn):
        return values
    pairs = zip(eqn.invars, operands, strict=True)
    return [x for v, x in pairs if not isinstance(v, Literal)]


def _operands(eqn: JaxprEqn, kept: Sequence[Any]) -> list[Any]:
    """Returns the operands of a site, of which the arrays were kept."""
    given = iter(kept)
    return [
        literal_value(v) if isinstance(v, Literal) else next(given)
        for v in (eqn.invars if is_product(eqn) else ())
    ]


def _again(eqn: JaxprEqn, kept: Sequence[Any]) -> list[Any]:
    """Returns the results of a site in float32."""
    return bound(eqn, _operands(eqn, kept)) if is_product(eqn) else list(kept)


def _tap(eqn: JaxprEqn, formats: Sequence[Format]) -> Any:
    """Returns the function that a site's results go through.

    It takes the array of zeros, what is kept for the backward pass, and the float results, which it
    returns. It closes over no array: a checkpoint could not compute that again.
    """

    @jax.custom_vjp
    def tap(zeros: Any, kept: Sequence[Any], values: list[Any]) -> list[Any]:
        return values

    def backward(kept: Sequence[Any], cotangents: list[Any]) -> tuple[Any, None, Any]:
        # Not before the cotangent is there: XLA would take what is computed here from the forward
        # pass, and keep it. For a product in float32 one of its operands is enough.
        late = _after(_one_of(cotangents[0]), kept)
        first = min(range(len(kept)), key=lambda k: kept[k].size)
        exact = _again(
            eqn, [x if k == first else y for k, (x, y) in enumerate(zip(late, kept, strict=True))]
        )
        rows: list[Any] = []
        for format in formats:
            low = lowered(eqn, _operands(eqn, late), exact, format)
            rows.append(numbers(exact, low, cotangents))
            # One after the other: XLA:CPU would compute them at the end, from arrays that it keeps.
            late = _after(rows[-1][0], late)
        return jnp.stack(rows), None, _after(rows[-1][0], cotangents)

    tap.defvjp(lambda zeros, kept, values: (values, kept), backward)
    return tap


def _one_of(x: Any) -> Any:
    """Returns a number that is there only when an array is."""
    # On an explicit mesh an element has no device of its own.
    is_spread = not getattr(jax.typeof(x).sharding, "mesh", jax.sharding.AbstractMesh((), ())).empty
    return jnp.max(x) if is_spread else x[(0,) * x.ndim]


def _after(number: Any, arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays that are there only when a number is.

    It has to be a use of the number: XLA:CPU drops an ``optimization_barrier`` early. Without it
    the pass of 12 layers took 3.9 times the memory of a gradient.
    """
    known = ~jnp.isnan(number)
    return [jnp.where(known, x, jnp.nan) if is_float(x) else x for x in arrays]


def numbers(exact: Sequence[Any], low: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """Returns the `NUMBERS` of values that are lowered.

    Args:
        exact: The values.
        low: The same in a format.
        cotangents: Their cotangents.
    """
    each = [_numbers(*given) for given in zip(exact, low, cotangents, strict=True)]
    return sum(each[1:], each[0])


@jax.jit
def _numbers(exact: Any, low: Any, cotangent: Any) -> Any:
    x, y, c = (each.astype(jnp.float32) for each in (exact, low, cotangent))
    lost = jnp.isfinite(x) & ~jnp.isfinite(y)
    # What the format cannot hold is counted, and told: first order says nothing of an infinity.
    part = jnp.where(jnp.isfinite(x) & jnp.isfinite(y), (y - x) * c, 0.0)
    each = (part, part * part, lost.astype(jnp.float32))
    # One reduction of three numbers is one kernel of XLA, and three are six. Along the last
    # dimension first: a sum of all elements, one after the other, would lose digits.
    for axes in (range(x.ndim - 1, x.ndim), range(x.ndim - 1)) if x.ndim else ():
        each = lax.reduce(each, (np.float32(0),) * NUMBERS, _added, tuple(axes))
    return jnp.stack(each)


def _added(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(operator.add, x, y))


def tapped(
    closed: AnyJaxpr,
    sites: Sites,
    formats: Sequence[Format],
    arrays: Sequence[Any],
    params: Sequence[int],
    scalar: Callable[[list[Any]], tuple[Any, Any]],
) -> tuple[Any, list[Any]]:
    """Returns what is computed beside a scalar, and the numbers of all sites and some inputs.

    Args:
        closed: The program.
        sites: Its sites.
        formats: The formats.
        arrays: Its inputs.
        params: The positions of inputs that are looked at, too.
        scalar: From its outputs to the scalar that is differentiated, and something beside it.
    """
    walk, chosen = Tapped(formats), [arrays[i] for i in params]
    zeros = sites.tree(lambda site: jnp.zeros((*site.loops, len(formats), NUMBERS)))

    def of_zeros(zeros: Any, chosen: list[Any]) -> tuple[Any, Any]:
        run = lambda *xs: walk.run(closed, sites, xs, zeros)  # noqa: E731
        return scalar(of_positions(run, arrays, params)(*chosen))

    gradient = jax.grad(of_zeros, (0, 1), has_aux=True)
    (found, cotangents), beside = gradient(zeros, chosen)
    rows = jax.tree.leaves(found)
    for x, cotangent in zip(chosen, cotangents, strict=True):
        each = [numbers([x], [narrowed(x, format)], [cotangent]) for format in formats]
        rows.append(jnp.stack(each))
    return beside, rows


class Lowered(Walk):
    """Lowers sites: `held` has, for each, a dict from the position of a format to a bool."""

    def at(self, eqn: JaxprEqn, operands: Sequence[Any], held: Any) -> list[Any]:
        """Returns the results in float32, or in the format that is chosen."""
        results = bound(eqn, operands)
        for k, chosen in held.items():
            low = lowered(eqn, operands, results, self.formats[k])
            pairs = zip(results, low, strict=True)
            results = [jnp.where(chosen, y, x) if is_float(x) else x for x, y in pairs]
        return results
