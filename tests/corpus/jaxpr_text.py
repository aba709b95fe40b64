"""A jaxpr as text that is the same in every process: one equation a line, inner jaxprs below it.

Left out: source lines, names and name stacks, parameters that are None or empty, and the identity
of objects. A jaxpr that several equations share is printed with each: who shares what depends on
caches. Functions in parameters (rules that run when JAX differentiates) have no name: what they do
is seen in the gradients.
"""

from __future__ import annotations

import itertools
import re
import types
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jmp_autocast.interpreters.compat import Tracer

# What an equation remembers of the code around it, where it differs from the usual.
CONTEXT = ("compute_type", "cur_abstract_mesh", "threefry_partitionable", "xla_metadata")

SEPARATOR = "; "
"""Stands between the parameters of an equation, and nowhere else in a line."""


def jaxpr_text(jaxpr: Any) -> str:
    """Returns the text of an open or closed jaxpr."""
    return "\n".join(_Printer().lines(jaxpr))


def first_line_of(error: BaseException) -> str:
    """The type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return without_identity(f"{type(error).__name__}: {lines[0] if lines else ''}"[:400])


def without_identity(text: str) -> str:
    """The text without addresses, and without the names of objects that have one."""
    text = re.sub(r"<(?:bound method|built-in method|function) .*? at 0x[0-9a-f]+>+", "<f>", text)
    text = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "<object>", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


def _default_context() -> Any:
    return jax.make_jaxpr(lambda x: x + 1)(1.0).eqns[0].ctx


class _Printer:
    """Prints one program; a jaxpr that occurs again is not read again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[str]]] = {}
        self._usual = _default_context()

    def lines(self, jaxpr: Any) -> list[str]:
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, list(self._lines(jaxpr))
        return self._known[id(jaxpr)][1]

    def _lines(self, jaxpr: Any) -> Iterator[str]:
        body = getattr(jaxpr, "jaxpr", jaxpr)
        names = {v: f"a{i}" for i, v in enumerate(body.invars)}
        names |= {v: f"c{i}" for i, v in enumerate(body.constvars)}
        yield "inputs " + " ".join(f"{names[v]}:{_type(v.aval)}" for v in body.invars)
        consts = getattr(jaxpr, "consts", ())
        for v, value in itertools.zip_longest(body.constvars, consts):
            name = "const" if v is None else f"{names[v]}:{_type(v.aval)}"
            yield f"const {name} {'' if value is None else array_text(value)}"

        def atom(x: Any) -> str:
            return _literal(x) if hasattr(x, "val") else names[x]

        for eqn in body.eqns:
            for v in eqn.outvars:
                names[v] = "_" if type(v).__name__ == "DropVar" else f"v{len(names)}"
            results = " ".join(f"{names[v]}:{_type(v.aval)}" for v in eqn.outvars)
            yield " ".join([results, "=", eqn.primitive.name, *map(atom, eqn.invars)]) + (
                self._parameters(eqn)
            )
            yield from self._inner(eqn)
        effects = sorted(map(str, getattr(body, "effects", ())))
        if effects:
            yield f"effects {' '.join(map(without_identity, effects))}"
        yield "return " + " ".join(map(atom, body.outvars))

    def _parameters(self, eqn: Any) -> str:
        params = [
            f"{name}={_text(value).replace(SEPARATOR, ' ')}"
            for name, value in sorted(eqn.params.items())
            if not (value is None or _is_empty(value) or list(_jaxprs(value)))
        ]
        for name in CONTEXT:
            value = getattr(eqn.ctx, name, None)
            if value != getattr(self._usual, name, None):
                params.append(f"ctx.{name}={_text(value).replace(SEPARATOR, ' ')}")
        return f" [{SEPARATOR.join(params)}]" if params else ""

    def _inner(self, eqn: Any) -> Iterator[str]:
        for name, value in sorted(eqn.params.items()):
            for where, jaxpr in _jaxprs(value):
                yield f"  {name}{where}"
                yield from (f"    {line}" for line in self.lines(jaxpr))


def _jaxprs(value: Any) -> Iterator[tuple[str, Any]]:
    """The jaxprs that a parameter is, or that stand in its tuples."""
    if hasattr(getattr(value, "jaxpr", value), "eqns"):
        yield "", value
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from ((f"[{i}]{where}", jaxpr) for where, jaxpr in _jaxprs(item))


def _is_empty(value: Any) -> bool:
    return isinstance(value, tuple | list | dict | set | frozenset) and not value


def _type(aval: Any) -> str:
    text = aval.str_short(short_dtypes=True)
    return f"~{text}" if getattr(aval, "weak_type", False) else text


def _literal(literal: Any) -> str:
    if literal.aval.shape:
        return f"{array_text(literal.val)}:{_type(literal.aval)}"
    return f"{np.asarray(literal.val).item()!r}:{_type(literal.aval)}"


def array_text(x: Any) -> str:
    """The type of an array and a checksum of its elements."""
    if jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key):
        return f"{x.dtype} {array_text(jax.random.key_data(x))}"
    if isinstance(x, Tracer):
        return f"traced {_type(x.aval)}"
    x = np.asarray(x)
    return f"{x.dtype.name}{list(x.shape)} {zlib.crc32(np.ascontiguousarray(x).tobytes()):08x}"


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray | jax.Array):
        return array_text(value)
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_text(k)}: {_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, tuple | list) and type(value).__repr__ in (tuple.__repr__, list.__repr__):
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, type):
        return value.__name__
    if callable(value) or type(value).__name__ == "WrappedFun":
        return _callable_text(value)
    return without_identity(" ".join(repr(value).split()))


def _callable_text(value: Any) -> str:
    """The name of a function of JAX, such as a policy of `jax.checkpoint`, and of no other."""
    if not (getattr(value, "__module__", None) or "").startswith("jax"):
        return "<callable>"
    if isinstance(value, types.FunctionType):
        return f"<{value.__qualname__}>"
    text = repr(value)
    return "<callable>" if " at 0x" in text or "\n" in text else text
