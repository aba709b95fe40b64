"""A random program: statements that are JAX source text, and the function that they make."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_autocast import autocast, compute_precision, full_precision

NAME = re.compile(r"\bv\d+\b")

# What the text of a program may refer to.
NAMESPACE: dict[str, Any] = {
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "np": np,
    "P": jax.sharding.PartitionSpec,
    "autocast": autocast,
    "compute_precision": compute_precision,
    "full_precision": full_precision,
}

HEADER = """\
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jmp_autocast import Policy, autocast, compute_precision, full_precision
"""


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The type of a value: shape, dtype name and weak type."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class Def:
    """A function in a program: one that a loop, a branch or a derivative rule calls."""

    name: str
    params: tuple[str, ...]
    body: tuple[Let, ...]
    result: str
    types: tuple[ArrayType, ...] = ()
    scope: str = ""

    def lines(self) -> Iterator[str]:
        yield f"def {self.name}({', '.join(self.params)}):"
        indent = "    "
        if self.scope:
            yield f"    with {self.scope}:"
            indent = "        "
        for let in self.body:
            yield from (indent + line for line in let.lines())
        yield f"{indent}return {self.result}"


@dataclasses.dataclass(frozen=True)
class Let:
    """A statement: names, their types, the expression, and the functions that it calls."""

    names: tuple[str, ...]
    types: tuple[ArrayType, ...]
    expr: str
    defs: tuple[Def, ...] = ()
    before: tuple[str, ...] = ()
    family: str = ""

    def lines(self) -> Iterator[str]:
        for inner in self.defs:
            yield from inner.lines()
        yield from self.before
        yield f"{', '.join(self.names)}{',' if len(self.names) > 1 else ''} = {self.expr}"

    def reads(self) -> set[str]:
        """The names of values that the statement and its functions mention."""
        return set(NAME.findall("\n".join(self.lines()))) - set(self.names)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of a dict of parameters, argument 0, and of data arrays."""

    params: tuple[str, ...]
    data: tuple[str, ...]
    types: dict[str, ArrayType]
    body: tuple[Let, ...]
    outputs: tuple[str, ...]
    x64: bool = False

    def text(self) -> str:
        lines = [f"def program({', '.join(('params', *self.data))}):"]
        if self.params:
            unpacked = ", ".join(f"params[{name!r}]" for name in self.params)
            lines.append(f"    {', '.join(self.params)}, = {unpacked},")
        for let in self.body:
            lines += ["    " + line for line in let.lines()]
        lines.append(f"    return ({' '.join(name + ',' for name in self.outputs)})")
        return "\n".join(lines) + "\n"

    def function(self) -> Callable[..., Any]:
        return function(self.text(), "program")


def function(text: str, name: str) -> Callable[..., Any]:
    """Returns the function that some source text defines."""
    namespace = dict(NAMESPACE)
    exec(compile(text, "<fuzz>", "exec"), namespace)
    return namespace[name]


@contextlib.contextmanager
def jax_settings(x64: bool) -> Iterator[None]:
    """The settings that programs are drawn and run under, whatever those around are."""
    with (
        jax.enable_x64(x64),
        jax.numpy_dtype_promotion("standard"),
        jax.check_tracer_leaks(False),
    ):
        yield


def live(body: tuple[Let, ...], wanted: set[str]) -> tuple[Let, ...]:
    """The statements that the wanted names need, in functions as well."""
    kept: list[Let] = []
    wanted = set(wanted)
    for let in reversed(body):
        if not wanted & set(let.names):
            continue
        let = dataclasses.replace(
            let,
            defs=tuple(
                dataclasses.replace(d, body=live(d.body, set(NAME.findall(d.result))))
                for d in let.defs
            ),
        )
        wanted |= let.reads()
        kept.append(let)
    return tuple(reversed(kept))


def pruned(program: Program) -> Program:
    """The program without statements that no output needs. Inputs stay."""
    return dataclasses.replace(program, body=live(program.body, set(program.outputs)))
