"""Primitives in NumPy: small programs are evaluated without compiling anything.

What has no rule here is bound to its primitive, one equation at a time. Both agree up to float32
roundings, which the error model allows for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast.interpreters.compat import bind, body_of

Rule = Callable[..., Any]


def apply(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """Evaluates an equation whose primitive holds no function."""
    rule = RULES.get(eqn.primitive.name)
    if rule is not None and all(isinstance(x, np.ndarray | np.generic) for x in xs):
        aval = eqn.outvars[0].aval
        with np.errstate(all="ignore"):
            out = rule(eqn, *(_computable(x) for x in xs))
        if out is not NotImplemented:
            if eqn.primitive.multiple_results:
                return [np.asarray(o, v.aval.dtype) for o, v in zip(out, eqn.outvars, strict=True)]
            with np.errstate(all="ignore"):
                return [np.asarray(out).astype(aval.dtype, copy=False)]
    out = bind(eqn.primitive, [_for_jax(x) for x in xs], eqn.params)
    return [to_numpy(o) for o in (out if eqn.primitive.multiple_results else [out])]


def to_numpy(x: Any) -> Any:
    """An array as NumPy's; keys and refs as they are."""
    numeric = isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return np.asarray(x) if numeric else x


def _for_jax(x: Any) -> Any:
    # `jnp.asarray` compiles something for each shape.
    return jax.device_put(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x


def _computable(x: Any) -> np.ndarray:
    """Narrow floats as float32: NumPy rounds each step of what it does in them."""
    x = np.asarray(x, order="C")  # in another order NumPy sums in another order
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    narrow = x.dtype.kind == "V" or (x.dtype.kind == "f" and x.dtype.itemsize < 4)
    return x.astype(np.float32) if narrow or x.dtype.name.startswith(("bfl", "float8")) else x


def _map(function: Rule) -> Rule:
    return lambda eqn, *xs: function(*xs)


def _floats(function: Rule) -> Rule:
    """A rule for real floats alone."""
    return lambda eqn, *xs: (
        function(*xs) if all(x.dtype.kind == "f" for x in xs) else NotImplemented
    )


def _div(eqn: Any, x: Any, y: Any) -> Any:
    return x / y if x.dtype.kind in "fc" else NotImplemented


def _logic(of_bools: Rule, of_integers: Rule) -> Rule:
    return lambda eqn, *xs: (of_bools if xs[0].dtype.kind == "b" else of_integers)(*xs)


def _convert(eqn: Any, x: Any) -> Any:
    target = np.dtype(eqn.params["new_dtype"])
    if x.dtype.kind == "c" and target.kind != "c":
        x = x.real
    if target.kind in "iu" and x.dtype.kind == "f":
        info = np.iinfo(target)
        wide = np.nan_to_num(np.trunc(x).astype(np.float64), posinf=info.max, neginf=info.min)
        top = math.nextafter(float(info.max) + 1, 0) if target.itemsize == 8 else info.max
        return np.clip(wide, info.min, top).astype(target)
    if target.kind == "b":
        return x != 0
    return x.astype(target) if not target.name.startswith("float8") else NotImplemented


def _dot(eqn: Any, x: Any, y: Any) -> Any:
    if x.dtype.kind not in "fc":
        return NotImplemented
    (cx, cy), (bx, by) = eqn.params["dimension_numbers"]
    left, right = list(range(x.ndim)), [x.ndim + i for i in range(y.ndim)]
    for i, j in (*zip(cx, cy, strict=True), *zip(bx, by, strict=True)):
        right[j] = left[i]
    out = [left[i] for i in bx]
    out += [a for i, a in enumerate(left) if i not in (*bx, *cx)]
    out += [a for j, a in enumerate(right) if j not in (*by, *cy)]
    return np.einsum(x, left, y, right, out)


def _accumulate(eqn: Any, *xs: Any) -> Any:
    """Movements and one contraction of 16-bit values, whose result is not rounded."""
    body, low = body_of(eqn.params["jaxpr"]), eqn.params["low"]
    rounded = (x.astype(low).astype(np.float32) if x.dtype.kind == "f" else x for x in xs)
    env = dict(zip(body.invars, rounded, strict=False))
    for inner in body.eqns:
        rule = RULES.get(inner.primitive.name)
        out = NotImplemented if rule is None else rule(inner, *(env[v] for v in inner.invars))
        if out is NotImplemented:
            return NotImplemented
        env[inner.outvars[0]] = out
    return env[body.outvars[0]]


def _reduce(function: Rule) -> Rule:
    def rule(eqn: Any, x: Any) -> Any:
        axes = tuple(eqn.params["axes"])
        empty = any(x.shape[a] == 0 for a in axes)
        return NotImplemented if empty or x.dtype.kind == "c" else function(x, axis=axes)

    return rule


def _total(function: Rule) -> Rule:
    return lambda eqn, x: function(x, axis=tuple(eqn.params["axes"]), dtype=x.dtype)


def _reshape(eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    order = eqn.params["dimensions"]
    return (x if order is None else np.transpose(x, order)).reshape(eqn.params["new_sizes"])


def _broadcast(eqn: Any, x: Any, *_: Any) -> Any:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    full = [1] * len(shape)
    for size, dim in zip(x.shape, dims, strict=True):
        full[dim] = size
    return np.broadcast_to(x.reshape(full), shape)


def _slice(eqn: Any, x: Any) -> Any:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, start, limit, strides))]


def _pad(eqn: Any, x: Any, value: Any) -> Any:
    shape, at, kept = [], [], []
    for n, (low, high, inner) in zip(x.shape, eqn.params["padding_config"], strict=True):
        spread = n + max(n - 1, 0) * inner
        first = max(low, 0)
        shape.append(first + spread + max(high, 0))
        at.append(slice(first, first + spread, inner + 1))
        kept.append(slice(max(-low, 0), shape[-1] - max(-high, 0)))
    out = np.full(shape, value, x.dtype)
    out[tuple(at)] = x
    return out[tuple(kept)]


def _starts(x: Any, sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    begin = [min(max(int(s), 0), n - k) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(b, b + k) for b, k in zip(begin, sizes, strict=True))


def _update(eqn: Any, x: Any, update: Any, *starts: Any) -> Any:
    out = np.array(x)
    out[_starts(x, update.shape, starts)] = update
    return out


def _select(eqn: Any, which: Any, *cases: Any) -> Any:
    if which.dtype.kind == "b":
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _logistic(x: Any) -> Any:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def _iota(eqn: Any) -> Any:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    line = np.arange(shape[dim]).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return np.broadcast_to(line, shape)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])

RULES: dict[str, Rule] = {
    **{
        name: _map(function)
        for name, function in {
            "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply,
            "max": np.maximum, "min": np.minimum, "neg": np.negative, "abs": np.abs,
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
            "gt": np.greater, "ge": np.greater_equal, "square": np.square, "real": np.real,
            "imag": np.imag, "conj": np.conj, "complex": lambda x, y: x + 1j * y,
            "copy": np.asarray, "copy_p": np.asarray, "stop_gradient": np.asarray,
            "pvary": np.asarray, "source_view": lambda full, low: low,
        }.items()
    },
    **{
        name: _floats(function)
        for name, function in {
            "exp": np.exp, "exp2": np.exp2, "log": np.log, "log1p": np.log1p, "expm1": np.expm1,
            "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "atan2": np.arctan2,
            "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos,
            "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
            "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt,
            "logistic": _logistic, "pow": np.power, "sign": np.sign, "floor": np.floor,
            "ceil": np.ceil, "rem": np.fmod, "is_finite": np.isfinite, "erf": _erf, "erfc": _erfc,
        }.items()
    },
    "integer_pow": lambda eqn, x: (
        np.power(x, np.float32(eqn.params["y"])) if x.dtype == np.float32 else NotImplemented
    ),
    "div": _div,
    "not": _logic(np.logical_not, np.invert),
    "and": _logic(np.logical_and, np.bitwise_and),
    "or": _logic(np.logical_or, np.bitwise_or),
    "xor": _logic(np.logical_xor, np.bitwise_xor),
    "convert_element_type": _convert,
    "dot_general": _dot,
    "accumulate": _accumulate,
    "reduce_sum": _total(np.sum),
    "reduce_prod": _total(np.prod),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda eqn, x: np.squeeze(x, tuple(eqn.params["dimensions"])),
    "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": lambda eqn, x, *starts: x[_starts(x, eqn.params["slice_sizes"], starts)],
    "dynamic_update_slice": _update,
    "select_n": _select,
    "iota": _iota,
    "optimization_barrier": lambda eqn, *xs: xs,
}  # fmt: skip
