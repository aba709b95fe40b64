"""A program of the corpus, and the functions that are traced of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import Policy, autocast

Function = Callable[..., Any]


class Setting(NamedTuple):
    """A level and a compute dtype."""

    level: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.level} {self.dtype}"


LEVELS, DTYPES = ("o1", "compute", "tensor_cores"), ("bfloat16", "float16")
ALL = tuple(Setting(level, dtype) for level in LEVELS for dtype in DTYPES)
"""All settings, the usual one first."""
FEW = (Setting("o1", "bfloat16"), Setting("compute", "bfloat16"), Setting("o1", "float16"))


def rotated(index: int, count: int) -> tuple[Setting, ...]:
    """The first setting and ``count - 1`` others: programs of long tables share them out."""
    others = [ALL[1 + (index * (count - 1) + i) % (len(ALL) - 1)] for i in range(count - 1)]
    return ALL[0], *others


def unchanged(fn: Function) -> Function:
    return fn


def plain_policy(setting: Setting, **options: Any) -> Policy:
    return Policy(setting.dtype, level=setting.level, **options)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, its arguments, and how `autocast` is applied to it.

    Args:
        name: No two programs of a source have the same.
        build: Makes the function and its arguments; only recorded programs are built.
        settings: The levels and compute dtypes that are recorded.
        policy: From a setting to the policy.
        options: More options of `autocast`.
        cast: `autocast`, or what an integration has in its place.
        around: A transformation of the cast function, which autocast does not see.
        derive: The arguments of which the derivative is taken; None for the first one with floats.
        forward_mode: JAX has no gradient of the program; tangents are recorded in its place.
        context: The settings of JAX that it is built and traced under.
    """

    name: str
    build: Callable[[], tuple[Function, Sequence[Any]]]
    settings: tuple[Setting, ...] = ALL
    policy: Callable[..., Policy] = plain_policy
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cast: Function = autocast
    around: Callable[[Function], Function] = unchanged
    derive: tuple[int, ...] | None = None
    forward_mode: bool = False
    context: Callable[[], Any] = contextlib.nullcontext


def given(name: str, fn: Function, *args: Any, **options: Any) -> Program:
    """A program whose function and arguments exist already."""
    return Program(name, lambda: (fn, args), **options)


def of_table(
    table: Mapping[str, Any], *args: Any, prefix: str = "", **options: Any
) -> Iterator[Program]:
    """Programs of a table of functions; of a row that is a tuple the first item is the function."""
    for name, row in table.items():
        fn = row[0] if isinstance(row, tuple) else row
        yield given(f"{prefix}{name}", fn, *args, **options)


class Arguments:
    """Arguments as the arrays in them: what is traced, and what of it is differentiated.

    Args:
        args: Trees of arrays, their types, Python numbers and anything else, which stays static.
        derive: As of a `Program`.
    """

    def __init__(self, args: Sequence[Any], derive: tuple[int, ...] | None) -> None:
        self.leaves, self.tree = jax.tree.flatten(tuple(args))
        self.traced = [i for i, x in enumerate(self.leaves) if _is_array(x)]
        numbers = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        floats = [i for i in self.traced if _is_float(self.leaves[i])]
        if derive is None:
            derive = tuple(numbers[i] for i in floats[:1])
        self.derived = [i for i in floats if numbers[i] in derive]

    def arrays(self) -> list[Any]:
        return [self.leaves[i] for i in self.traced]

    def flat(self, fn: Function) -> Function:
        """``fn`` as a function of the arrays."""
        return lambda *arrays: fn(*self._with(self.traced, arrays))

    def derivative(self, fn: Function, forward_mode: bool, squared: bool = False) -> Function:
        """The sum of the float results of ``fn`` and its derivative, as a function of the arrays.

        Args:
            fn: A function of the arguments.
            forward_mode: The derivative is a tangent, along the arguments themselves.
            squared: The results are squared before the sum, so that cotangents are computed.
        """

        def run(*arrays: Any) -> Any:
            values = dict(zip(self.traced, arrays, strict=True))

            def total(*floats: Any) -> Any:
                return sum_of_floats(
                    fn(*self._with([*values, *self.derived], [*values.values(), *floats])), squared
                )

            floats = [jnp.asarray(values[i]) for i in self.derived]
            if forward_mode:
                return jax.jvp(total, floats, floats)
            return jax.value_and_grad(total, tuple(range(len(floats))))(*floats)

        return run

    def _with(self, positions: Sequence[int], values: Sequence[Any]) -> Any:
        leaves = list(self.leaves)
        for i, value in zip(positions, values, strict=True):
            leaves[i] = value
        return self.tree.unflatten(leaves)


def sum_of_floats(tree: Any, squared: bool) -> Any:
    total = jnp.float32(0)
    for x in map(jnp.asarray, _numbers(tree)):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            x = jnp.real(x).astype(jnp.float32)
            total = total + jnp.sum(x * x if squared else x)
    return total


def _numbers(tree: Any) -> list[Any]:
    keys = jax.dtypes.prng_key
    return [
        x
        for x in jax.tree.leaves(tree)
        if _is_array(x) and not jnp.issubdtype(jax.typeof(x).dtype, keys)
    ]


def _is_array(x: Any) -> bool:
    return isinstance(x, int | float | complex) or (hasattr(x, "dtype") and hasattr(x, "shape"))


def _is_float(x: Any) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else np.result_type(type(x))
    return jnp.issubdtype(dtype, jnp.floating)
