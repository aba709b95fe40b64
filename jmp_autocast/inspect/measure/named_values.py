"""Compares the values of the same name in two different programs.

``jax.ad_checkpoint.checkpoint_name`` names a value. The last value computed in a
``jax.named_scope``, such as the output of a module, has the name of the scope. Values in loops and
branches have no names, because a loop over tokens computes a value per iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ...autocast import opened
from ...call.arguments import check_function, flatten, name_of
from ...interpreters import compat
from ...interpreters.primitives.evaluate import evaluate
from ...interpreters.primitives.reading import checkpoint_name_in
from ...interpreters.primitives.structure import bodies, is_call
from ...policies.errors import wrong_type
from ..export import Exported, cut, table
from ..signature import Traced
from .error_probe import ArrayError, distance_and_norms, largest_difference, worst_of
from .measured import is_measurable, user_scopes

compat.mark_frames(__file__)

_SHOWN = 40
OUTPUT = "output "


@dataclasses.dataclass(frozen=True, slots=True)
class NamedError(ArrayError):
    """The error of a named value of the second program against that of the first program.

    Args:
        error: The relative error: the norm of the difference over the norm of the first value.
        cosine: The cosine of the angle between the two values.
        lost: The number of elements that are infinite or NaN in the second program alone.
        largest: The largest finite magnitude in the first program.
        name: The scopes, joined by ``/``, or the name given by `checkpoint_name`.
        dtypes: The dtype in each program.
        difference: The largest absolute difference of an element. For log-probabilities it is the
            logarithm of the largest importance ratio.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import compare
        >>> def f(x):
        ...     return jax.nn.log_softmax(x)
        >>> def g(x):
        ...     return jax.nn.log_softmax(x.astype(jnp.bfloat16))
        >>> compare(f, jnp.arange(4.0), against=g).outputs["0"].dtypes
        ('float32', 'bfloat16')
    """

    name: str
    dtypes: tuple[str, str]
    difference: float


@dataclasses.dataclass(frozen=True)
class ProgramComparison(Exported):
    """The result of ``compare(fn, ..., against=other)``.

    Args:
        name: The first function's name; ``"arrays"`` for a dict of arrays.
        against: The second function's name.
        values: The errors of named values with equal shapes in both programs, in the order of the
            first program.
        outputs: The errors of outputs with equal shapes in both programs, by position.
        unmatched: The names that only one program has, or whose values have different shapes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import autocast, compare
        >>> def model(w, x):
        ...     with jax.named_scope("dense"):
        ...         h = x @ w
        ...     with jax.named_scope("head"):
        ...         return jax.nn.log_softmax(h)
        >>> sampler = autocast(model, jnp.bfloat16)
        >>> found = compare(model, jnp.eye(8), jnp.full((2, 8), 0.1), against=sampler)
        >>> [each.name for each in found.values]
        ['dense', 'head']
    """

    name: str
    against: str
    values: tuple[NamedError, ...]
    outputs: Mapping[str, NamedError]
    unmatched: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The comparison in one line.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import compare
            >>> compare(jnp.sin, jnp.ones(4), against=jax.jit(jnp.sin)).summary
            'sin against sin: outputs differ by 0 at most, and err by 0; 0 named values'
        """
        compared = [*self.outputs.values()] or self.values
        worst = worst_of(each.difference for each in compared)
        error = worst_of(each.error for each in compared)
        kind = "outputs" if self.outputs else "values"
        line = f"{self.name} against {self.against}: {kind} differ by {worst:.2g} at most"
        return cut(f"{line}, and err by {error:.2g}; {len(self.values)} named values")

    def first_beyond(self, tolerance: float = 1e-3) -> NamedError | None:
        """Returns the first value with a relative error above a tolerance, None if there is none.

        Args:
            tolerance: The largest accepted relative error. Rounding in float32 stays below 1e-3; in
                bfloat16 a value may err by 1e-2.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import compare
            >>> compare(jnp.sin, jnp.ones(4), against=jnp.cos).first_beyond().name
            'output 0'
        """
        values = (*self.values, *self.outputs.values())
        return next((each for each in values if not each.error <= tolerance), None)

    def __str__(self) -> str:
        """Returns the summary, the named values in program order, and the outputs."""
        columns = {"error": ">8.2g", "difference": ">10.2g", "cosine": ">8.5f", "largest": ">9.3g"}
        columns |= {"dtypes": "22", "name": ""}

        def cells(each: NamedError) -> list[Any]:
            dtypes = " and ".join(dict.fromkeys(each.dtypes))
            return [each.error, each.difference, each.cosine, each.largest, dtypes, each.name]

        lines = [self.summary, "", *table(columns, self.values, cells, _SHOWN)]
        if self.outputs:
            lines += ["", *table(columns, [*self.outputs.values()], cells, _SHOWN)]
        if self.unmatched:
            lines += ["", cut(f"not compared: {', '.join(self.unmatched)}")]
        return "\n".join(lines)


def values_of(closed: compat.ClosedJaxpr, arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns the named values of a program and its outputs, by name."""
    found: dict[str, Any] = {}

    def run(jaxpr: compat.AnyJaxpr, args: Sequence[Any], path: tuple[str, ...]) -> list[Any]:
        def step(i: int, eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            names = (*path, *user_scopes(eqn))
            if is_call(eqn):
                (body,) = bodies(eqn)
                results = run(body.jaxpr, [operands[k] for k in body.operands], names)
                return [results[body.results.index(k)] for k in range(len(eqn.outvars))]
            results = compat.bound(eqn, operands)
            if measured := [x for x in results if is_measurable(jax.typeof(x))]:
                # The last value of a scope replaces the earlier ones.
                scopes = ["/".join(names[: depth + 1]) for depth in range(len(names))]
                if name := checkpoint_name_in(eqn):
                    scopes.append(name)
                found.update(dict.fromkeys(scopes, measured[0]))
            return results

        return evaluate(jaxpr, compat.consts_of(jaxpr), args, compat.literal_value, step)

    outputs = enumerate(run(closed, arrays, ()))
    return found | {f"{OUTPUT}{i}": x for i, x in outputs if is_measurable(jax.typeof(x))}


def compare_programs(
    fn: Callable[..., Any],
    other: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ProgramComparison:
    """Runs two programs on the same arguments, and compares the values with equal names."""
    calls = []
    for each in (fn, other):
        check_function(each, "compare", "Pass the second function as against=.")
        # State that the call writes is discarded.
        with opened(each, args, kwargs) as pure:
            call = flatten(pure.fn, (), pure.args, pure.kwargs)
            calls.append((call, compat.fresh_make_jaxpr(call.traceable, *call.arrays)))

    @jax.jit
    def run(*arrays: Any) -> Traced:
        pairs = zip(calls, arrays, strict=True)
        return _errors(*(values_of(closed, each) for (_, closed), each in pairs))

    found = run(*(call.arrays for call, _ in calls))
    return _comparison(name_of(fn), name_of(other), found)


def compare_arrays(
    arrays: Mapping[str, Any], others: Mapping[str, Any], args: Any, kwargs: Any
) -> ProgramComparison:
    """Compares the arrays of two dicts by key; raises if ``args`` or ``kwargs`` are not empty."""
    if args or kwargs or not isinstance(others, Mapping):
        raise wrong_type("compare of a dict of arrays takes another dict as against=", others, _FIX)
    for name, x in (*arrays.items(), *others.items()):
        if not hasattr(x, "dtype") or not is_measurable(jax.typeof(x)):
            raise wrong_type(f"compare takes arrays of floats, and {name!r}", x, _FIX)
    if not arrays.keys() & others.keys():
        raise ValueError(
            "compare finds no name that both dicts of arrays have, in "
            f"{sorted(arrays)[:12]} and {sorted(others)[:12]}. "
            "Give both arrays of one value the same key."
        )
    found = jax.jit(_errors)(dict(arrays), dict(others))
    return _comparison("arrays", "arrays", found)


_FIX = "Write compare({'layer_0': x}, against={'layer_0': y})."


def _errors(one: Mapping[str, Any], two: Mapping[str, Any]) -> Traced:
    """Returns errors, names and dtypes of values with equal shapes, and the unmatched names."""
    errors, dtypes, unmatched = [], [], []
    for name in dict.fromkeys([*one, *two]):
        x, y = one.get(name), two.get(name)
        if x is None or y is None or x.shape != y.shape:
            unmatched.append(name)
            continue
        dtypes.append((name, (x.dtype.name, y.dtype.name)))
        errors.append((distance_and_norms(x, y)[0], largest_difference(x, y)))
    return Traced(errors, (tuple(dtypes), tuple(unmatched)))


def _comparison(name: str, against: str, found: Traced) -> ProgramComparison:
    names, unmatched = found.static
    measured = jax.tree.map(lambda x: x.item(), jax.device_get(found.arrays))
    errors = [
        NamedError(**dataclasses.asdict(error), name=name, dtypes=pair, difference=difference)
        for (error, difference), (name, pair) in zip(measured, names, strict=True)
    ]
    outputs = {e.name.removeprefix(OUTPUT): e for e in errors if e.name.startswith(OUTPUT)}
    values = tuple(e for e in errors if not e.name.startswith(OUTPUT))
    return ProgramComparison(name, against, values, outputs, unmatched)
