"""Which carries of a loop come back to themselves: structure alone, no dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..compat import Atom, Jaxpr, Literal, body_of
from ..primitives.structure import called, is_call
from ..primitives.traits import having

_DAMPS = having("damps") | having("contracts")


def accumulating_carries(body: Jaxpr, first: int, count: int) -> frozenset[int]:
    """Returns the carries that come back to themselves through sums, products and the like.

    A path through a matmul or a convolution does not count: it is a new value in each step. Nor
    does one through a sigmoid, whose slope is at most 1/4. Other functions are the identity
    somewhere: 4,096 steps of ``sqrt(h * h + y)`` ended at 11.4 instead of 45.25 in bfloat16.

    Args:
        body: The loop's body.
        first: The input that is its first carry. The carries are the first outputs.
        count: The number of carries.
    """
    sources = [
        [i - first for i in found.cheap if first <= i < first + count]
        for found in _origins(body, frozenset())[:count]
    ]

    def returns_to(k: int) -> bool:
        # A carry that reaches itself adds up the rounding of each step, like a running mean; one
        # that goes through a matmul is a new value each time, like the state of an RNN. Carries may
        # swap places: follow the paths over several iterations.
        pending, seen = list(sources[k]), set()
        while pending and k not in seen:
            if (i := pending.pop()) not in seen:
                seen.add(i)
                pending += sources[i]
        return k in seen

    return frozenset(k for k in range(count) if returns_to(k))


def residual_streams(
    body: Jaxpr, first: int, count: int, parameters: frozenset[int]
) -> frozenset[int]:
    """Returns the carries ``x`` that come back as ``x + f(x)`` with layers in ``f``.

    A layer multiplies the carry with a parameter. What multiplies it with data is a solver's or an
    optimizer's step, whose carry is an accumulator like any other.

    Args:
        body: The loop's body.
        first: The input that is its first carry. The carries are the first outputs.
        count: The number of carries.
        parameters: The inputs of the body that are parameters.
    """
    found = _origins(body, parameters)[:count]
    return frozenset(k for k, it in enumerate(found) if first + k in it.cheap & it.layered)


class _Origins(NamedTuple):
    """The inputs of a body that reach a value through cheap equations, and through a layer."""

    cheap: frozenset[int] = frozenset()
    layered: frozenset[int] = frozenset()

    @classmethod
    def union(cls, several: Iterable[_Origins]) -> _Origins:
        several = list(several)
        return cls(*(frozenset().union(*sets) for sets in zip(*several, strict=True)))


def _origins(body: Jaxpr, parameters: frozenset[int]) -> list[_Origins]:
    """Returns, for each output, the inputs that reach it.

    Cheaply: with no matmul and no damping function between. Through a layer: with a matmul between,
    whose other operand comes from a parameter.
    """
    found = {v: _Origins(frozenset((i,))) for i, v in enumerate(body.invars)}

    def of(atoms: Iterable[Atom]) -> list[_Origins]:
        return [_Origins() if isinstance(v, Literal) else found.get(v, _Origins()) for v in atoms]

    for eqn in body.eqns:
        operands = of(eqn.invars)
        if not any(any(sets) for sets in operands):
            continue
        # `jax.nn.relu` and `jnp.where` are calls: unless their bodies are followed, every output
        # would come from every input.
        if is_call(eqn):
            given = frozenset(i for i, it in enumerate(operands) if it.cheap & parameters)
            inner = _origins(body_of(called(eqn)), given)
            results = [_within(it, operands) for it in inner]
        elif eqn.primitive.name in _DAMPS:
            layered = _Origins.union(operands).layered
            if any(it.cheap & parameters for it in operands):
                layered = layered.union(*(it.cheap for it in operands))
            results = [_Origins(layered=layered)] * len(eqn.outvars)
        else:
            results = [_Origins.union(operands)] * len(eqn.outvars)
        found.update(zip(eqn.outvars, results, strict=True))
    return of(body.outvars)


def _within(inner: _Origins, operands: Sequence[_Origins]) -> _Origins:
    """Returns the origins of a call's result, from those of the call's operands."""
    cheap = (
        _Origins.union(_Origins(*operands[i]) for i in inner.cheap) if inner.cheap else _Origins()
    )
    layered = cheap.layered.union(*(a | b for a, b in (operands[i] for i in inner.layered)))
    return _Origins(cheap.cheap, layered)
