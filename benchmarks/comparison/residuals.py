"""What the forward pass keeps for the backward pass, read from the jaxpr of `jax.vjp`.

The same on every backend. Equal equations count once, as XLA merges them; inputs, and what is made
from constants alone, do not count. XLA also computes again what is cheap in the fusion that reads
it, and rather keeps a 16-bit value than its float32 copy or twice that: `Residuals.folded` counts
with that, `Residuals.nbytes` without.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jmp_autocast.interpreters.compat import Literal

from .flow import MOVES, Held, inside, live, nbytes_of, scope_of

# Elementwise with one array operand, and cheap: computed again wherever they are read.
_CHEAP = MOVES | frozenset("neg abs sign add sub mul square integer_pow max min".split())


@dataclasses.dataclass(frozen=True)
class Kept:
    """One array that is kept for the backward pass.

    Args:
        parameter: It is a copy of a parameter.
        what: Its dtype and shape.
        where: The primitive that made it, and its scope.
        nbytes: Its bytes.
    """

    parameter: bool
    what: str
    where: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of a loss.

    Args:
        arrays: Each array kept.
        folded: The bytes of activations that remain if cheap elementwise operations on one array
            are done again.
    """

    arrays: tuple[Kept, ...]
    folded: int

    def nbytes(self, parameter: bool = False) -> int:
        """Returns the bytes of activations, or of copies of parameters."""
        return sum(kept.nbytes for kept in self.arrays if kept.parameter is parameter)


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of the program: equal equations of equal operands give one value."""

    aval: Any
    eqn: Any = None  # None for an input
    scope: str = ""
    operands: tuple[_Value, ...] = ()
    parameter: bool = False
    constant: bool = False


def residuals(loss: Callable[..., Any], params: Any, batch: Any) -> Residuals:
    """Returns what `jax.vjp` of a loss keeps.

    Args:
        loss: From parameters and a batch to a loss and anything else.
        params: The parameters, arrays or shapes.
        batch: The batch.
    """

    def backward(params: Any, batch: Any) -> Any:
        return jax.vjp(lambda p: loss(p, batch), params, has_aux=True)[1]

    jaxpr = live(jax.make_jaxpr(backward)(params, batch))
    count = len(jax.tree.leaves(params))
    inputs = [_Value(v.aval, parameter=i < count) for i, v in enumerate(jaxpr.invars)]
    outputs = dict.fromkeys(_values(jaxpr, inputs, {}, ""))
    kept = [v for v in outputs if v.eqn is not None and not v.constant and v.aval.shape]
    arrays = tuple(Kept(v.parameter, *_describe(v), nbytes_of(v.aval)) for v in kept)
    return Residuals(arrays, _folded([v for v in kept if not v.parameter]))


def _values(
    jaxpr: Any, inputs: Sequence[_Value], known: dict[Any, _Value], scope: str
) -> list[_Value]:
    """Returns the values of a jaxpr's outputs; ``known`` holds those of equations seen before."""
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update((v, _Value(v.aval, constant=True)) for v in jaxpr.constvars)

    def read(atom: Any) -> _Value:
        if not isinstance(atom, Literal):
            return env[atom]
        key = ("literal", str(atom.val), str(atom.aval))
        return known.setdefault(key, _Value(atom.aval, constant=True))

    for eqn in jaxpr.eqns:
        operands = tuple(read(v) for v in eqn.invars)
        here = "/".join(filter(None, (scope, scope_of(eqn))))
        held = list(inside(eqn))
        if eqn.primitive.name in ("jit", "closed_call"):
            env.update(zip(eqn.outvars, _values(held[0].jaxpr, operands, known, here), strict=True))
            continue
        params = tuple((k, _hashable(value)) for k, value in sorted(eqn.params.items()))
        results = []
        for i, v in enumerate(eqn.outvars):
            value = _Value(v.aval, eqn, here, operands, _is_parameter(eqn, operands))
            value.constant = all(x.constant for x in operands) and not held and not eqn.effects
            key = (eqn.primitive, operands, params, i)
            results.append(value if eqn.effects else known.setdefault(key, value))
        if eqn.primitive.name == "scan":
            results = _of_loop(held[0], operands, results)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _of_loop(held: Held, operands: Sequence[_Value], results: Sequence[_Value]) -> list[_Value]:
    """Merges the stacked results of a loop that are one value in each step."""
    moving = [_Value(v.aval) for v in held.jaxpr.invars[held.fixed :]]
    outputs = _values(held.jaxpr, [*operands[: held.fixed], *moving], {}, "")
    first: dict[_Value, _Value] = {}
    merged = list(results)
    for i in range(len(held.carries), len(results)):
        merged[i] = first.setdefault(outputs[i], results[i])
        if outputs[i].eqn is not None:
            merged[i].eqn, merged[i].operands = outputs[i].eqn, ()
            merged[i].scope += "/" + outputs[i].scope
        merged[i].constant = outputs[i].constant
        merged[i].parameter = outputs[i].parameter
    return merged


def _is_parameter(eqn: Any, operands: Sequence[_Value]) -> bool:
    arrays = [v for v in operands if not v.constant]
    if eqn.primitive.name in ("dynamic_slice", "source_view"):
        arrays = arrays[:1]  # the others are indices, or the same leaf in 16 bits
    return eqn.primitive.name in MOVES and bool(arrays) and all(v.parameter for v in arrays)


def _describe(value: _Value) -> tuple[str, str]:
    aval = value.aval
    return f"{aval.dtype.name} {list(aval.shape)}", f"{value.eqn.primitive.name} in {value.scope}"


def _folded(kept: Iterable[_Value]) -> int:
    """Each array is kept itself, or the smallest one of the chain of cheap operations before it."""
    groups: defaultdict[_Value, list[int]] = defaultdict(list)
    for value in kept:
        smallest = nbytes_of(value.aval)
        while value.eqn is not None and value.eqn.primitive.name in _CHEAP:
            arrays = {v for v in value.operands if not v.constant}
            if len(arrays) != 1:
                break
            (value,) = arrays
            smallest = min(smallest, _cost(value))
        groups[value].append(smallest)
    return sum(min(_cost(root), sum(sizes)) for root, sizes in groups.items())


def _cost(value: _Value) -> int:
    return 0 if value.eqn is None else nbytes_of(value.aval)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
