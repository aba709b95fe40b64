"""Two different programs, value by value, where a name says which values belong together.

A value has a name if ``jax.ad_checkpoint.checkpoint_name`` gives it one, or if it is the last one
that a ``jax.named_scope`` makes: what a module returns. Values inside of loops and branches have
none: a loop over tokens makes as many as it has iterations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ...autocast import opened
from ...call.arguments import check_function, flatten, name_of
from ...interpreters.compat import fresh_make_jaxpr
from ...interpreters.primitives.reading import checkpoint_name_in
from ...interpreters.primitives.structure import is_call
from ..export import Exported, cut, table
from .comparison import ArrayError
from .error_probe import distance, largest_difference
from .measured import is_measurable
from .side_by_side import ByScope, Program, Site, Values, path_of

_SHOWN = 40
_OUTPUT = "output "


@dataclasses.dataclass(frozen=True, slots=True)
class NamedError(ArrayError):
    """How far one value of a program is from the value of that name in another.

    Args:
        error: The relative error: the norm of the difference over that of the first value.
        cosine: The cosine of the angle between the two.
        lost: The number of elements that are infinite or NaN in the second program alone.
        largest: The largest finite magnitude in the first program.
        name: The scopes, joined by ``/``, or the name that `checkpoint_name` gave.
        dtypes: The dtype in either program.
        difference: The largest difference of two elements. Of log-probabilities it is the logarithm
            of the largest importance ratio.

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
    """What ``compare(fn, ..., against=other)`` returns.

    Args:
        name: The first function's name.
        against: The second function's name.
        values: The named values that both programs have in one shape, in the order of the first.
        outputs: The outputs that both return in one shape, by their position.
        unmatched: The names that only one of them has, or that have two shapes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import autocast, compare
        >>> def model(w, x):
        ...     with jax.named_scope("dense"):
        ...         h = x @ w
        ...     with jax.named_scope("head"):
        ...         return jax.nn.log_softmax(h)
        >>> sampler = autocast(model, compute_dtype=jnp.bfloat16)
        >>> found = compare(model, jnp.eye(4), jnp.full((2, 4), 0.1), against=sampler)
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
        worst = max((each.difference for each in self.outputs.values()), default=0.0)
        error = max((each.error for each in self.outputs.values()), default=0.0)
        line = f"{self.name} against {self.against}: outputs differ by {worst:.2g} at most"
        return cut(f"{line}, and err by {error:.2g}; {len(self.values)} named values")

    def __str__(self) -> str:
        """Returns the summary, the named values in program order, and the outputs."""
        columns = {"error": ">8.2g", "difference": ">10.2g", "cosine": ">8.5f", "largest": ">9.3g"}
        columns |= {"dtypes": "22", "name": ""}

        def cells(each: NamedError) -> list[Any]:
            dtypes = " and ".join(dict.fromkeys(each.dtypes))
            return [each.error, each.difference, each.cosine, each.largest, dtypes, each.name]

        lines = [self.summary, "", *table(columns, self.values, cells, _SHOWN)]
        lines += ["", *table(columns, [*self.outputs.values()], cells, _SHOWN)]
        if self.unmatched:
            lines += ["", cut(f"not compared: {', '.join(self.unmatched)}")]
        return "\n".join(lines)


class _Namer(ByScope):
    """Runs a program, and keeps the values that have a name."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def enters(self, eqn: Any) -> bool:
        return is_call(eqn)

    def emit(self, site: Site[tuple[str, ...]], operands: list[Values]) -> list[Values]:
        i, eqn, (program,), _ = site
        results = program.emit(i, eqn, [value.arrays[0] for value in operands])
        made = [x.array for x in results if is_measurable(jax.typeof(x.array))]
        if made:
            path = path_of(site)
            for depth in range(1, len(path) + 1):
                # The last one stays: it is what the module returns.
                self.found["/".join(path[:depth])] = made[0]
            if name := checkpoint_name_in(eqn):
                self.found[name] = made[0]
        return [Values((x.array,)) for x in results]


def _traced(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Sequence[Any]]:
    check_function(fn, "compare", "Pass the second function as against=.")
    with opened(fn, args, kwargs) as pure:
        call = flatten(pure.fn, (), pure.args, pure.kwargs)
        return fresh_make_jaxpr(call.traceable, *call.arrays), call.arrays


def _values_of(closed: Any, arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns the values of a program by their names, its outputs among them."""
    walk = _Namer()
    outputs = walk.run(closed, [Program()], walk.given((x,) for x in arrays), ())
    for i, value in enumerate(outputs):
        if is_measurable(jax.typeof(value.arrays[0])):
            walk.found[f"{_OUTPUT}{i}"] = value.arrays[0]
    return walk.found


def compare_programs(
    fn: Callable[..., Any],
    other: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ProgramComparison:
    """Runs two programs on the same arguments, and compares the values of the same name.

    Args:
        fn: The first function.
        other: The second function.
        args: Positional arguments of both.
        kwargs: Keyword arguments of both.
    """
    traced = [_traced(each, args, kwargs) for each in (fn, other)]
    order: list[str] = []
    dtypes: dict[str, tuple[str, str]] = {}
    unmatched: list[str] = []

    @jax.jit
    def run(*arrays: Any) -> dict[str, Any]:
        one, two = (
            _values_of(closed, each) for (closed, _), each in zip(traced, arrays, strict=True)
        )
        made = {}
        for name in dict.fromkeys([*one, *two]):
            x, y = one.get(name), two.get(name)
            if x is None or y is None or x.shape != y.shape:
                unmatched.append(name)
                continue
            order.append(name)
            dtypes[name] = (x.dtype.name, y.dtype.name)
            made[name] = distance(x, y), largest_difference(x, y)
        return made

    made = run(*(arrays for _, arrays in traced))
    made = jax.tree.map(lambda x: x.item(), jax.device_get(made))
    errors = {
        name: NamedError(*made[name][0], name=name, dtypes=dtypes[name], difference=made[name][1])
        for name in order
    }
    outputs = {name: each for name, each in errors.items() if name.startswith(_OUTPUT)}
    return ProgramComparison(
        name=name_of(fn),
        against=name_of(other),
        values=tuple(each for name, each in errors.items() if name not in outputs),
        outputs={name.removeprefix(_OUTPUT): each for name, each in outputs.items()},
        unmatched=tuple(unmatched),
    )
