"""What is emitted for an equation in a scope that a policy gives a number format.

All of it is float32 but for what is rounded. Derivatives pass through a rounding as they are; the
cotangent of a product, or of an operation, is rounded itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..interpreters.compat import JaxprEqn, SymbolicZero, bind
from ..interpreters.plan.data import Place, Source
from ..interpreters.plan.rooms import emulates
from ..interpreters.primitives.reading import summed_axes, with_precision
from ..policies import CONTRACTIONS, DATA_MOVEMENT, DEFAULT_RULES, CastPolicy, Decision, Emulated
from .rounded_cotangent import rounded_cotangent
from .rounding import as_emulated


@emulates
def emulation(at: Place) -> Decision | None:
    """Returns what is emitted for an equation, None where nothing of it is rounded.

    Args:
        at: The equation, in a scope that has a format.
    """
    emulated = at.region.emulated
    assert emulated is not None
    emit = _EMITTED[emulated.of](at, emulated)
    return emit and Decision(emit=emit, name=f"{emulated.name} {emulated.of}")


# --- products ------------------------------------------------------------------------------------


def _product(at: Place, emulated: Emulated) -> Callable[..., Any] | None:
    if at.name not in CONTRACTIONS or list(at.floats[:2]) != [0, 1]:
        return None
    eqn, axes = at.eqn, summed_axes(at.eqn)
    multiply = _bound(eqn)
    read = functools.partial(_read, emulated)

    @jax.custom_jvp
    def product(lhs: Any, rhs: Any, *rest: Any) -> Any:
        return multiply(*_factors(lhs, rhs), *rest)

    def _factors(lhs: Any, rhs: Any) -> list[Any]:
        return [read(x, axis=axes.product[i], draw=i) for i, x in enumerate((lhs, rhs))]

    # With one term for each factor that has a tangent: both would be products with zeros else.
    @functools.partial(product.defjvp, symbolic_zeros=True)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        values, rest = _factors(*primals[:2]), primals[2:]
        out = multiply(*values, *rest)
        terms = []
        for i, tangent in enumerate(tangents[:2]):
            if isinstance(tangent, SymbolicZero):
                continue
            of_other, of_result = axes.gradients[i]
            factors = list(values)
            factors[i] = tangent
            if emulated.format.block is not None:
                # Blocks lie along what a product sums over, which is another dimension here. From
                # the rounded copy, as our float8 has it.
                factors[1 - i] = read(values[1 - i], axis=of_other, draw=1 - i)
            term = multiply(*factors, *rest)
            terms.append(rounded_cotangent(term, emulated, axis=of_result, draw=2 + i))
        return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)

    return product


def _bound(eqn: JaxprEqn) -> Callable[..., Any]:
    """Returns the primitive with its parameters; a product of float32 is one on each device."""
    # GPUs may multiply float32 in TF32, and TPUs in bfloat16, which would round once more.
    precision = with_precision(eqn, "highest") if eqn.primitive.name in CONTRACTIONS else None
    params = {**eqn.params, **(precision or {})}
    return lambda *operands: bind(eqn.primitive, operands, params)


# --- operations and parameters -------------------------------------------------------------------


def _operation(at: Place, emulated: Emulated) -> Callable[..., Any] | None:
    # What moves elements rounds nothing, and what keeps its dtypes is bits, keys and kernels.
    rule = DEFAULT_RULES.get(at.name, CastPolicy.KEEP)
    if at.name in DATA_MOVEMENT or rule is CastPolicy.KEEP or at.foreign:
        return None
    results = [k for k, v in enumerate(at.eqn.outvars) if at.declared(v) is not None]
    if not results:
        return None
    run, multiple, floats = _bound(at.eqn), at.eqn.primitive.multiple_results, list(at.floats)

    def operation(*operands: Any) -> Any:
        out = run(*_rounded_at(floats, operands, emulated))
        made = list(out) if multiple else [out]
        for k in results:
            made[k] = _result(made[k], emulated)
        return made

    return operation


def _parameters(at: Place, emulated: Emulated) -> Callable[..., Any] | None:
    stored = [i for i in at.floats if at.given[i].source is Source.PARAM]
    if not stored or at.foreign:
        return None
    run = _bound(at.eqn)
    axes = summed_axes(at.eqn).product if at.name in CONTRACTIONS else None
    return lambda *operands: run(*_rounded_at(stored, operands, emulated, axes))


_EMITTED: dict[str, Callable[[Place, Emulated], Callable[..., Any] | None]] = {
    "products": _product,
    "operations": _operation,
    "parameters": _parameters,
}


def _rounded_at(
    positions: Sequence[int],
    operands: Sequence[Any],
    emulated: Emulated,
    axes: Sequence[int] | None = None,
) -> list[Any]:
    """Returns operands some of which are rounded; derivatives pass through as they are."""
    read = list(operands)
    for i in positions:
        axis = axes[i] if axes is not None and i < len(axes) else -1
        read[i] = _read(emulated, read[i], axis, i)
    return read


def _read(emulated: Emulated, x: Any, axis: int = -1, draw: int = 0) -> Any:
    return as_emulated(emulated, emulated.format, x, axis, draw)


def _result(x: Any, emulated: Emulated) -> Any:
    return _read(emulated, rounded_cotangent(x, emulated, draw=5), draw=4)
