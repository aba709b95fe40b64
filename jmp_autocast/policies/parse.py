"""Conversion of strings, dtypes and policies of `jmp` to a `Policy`."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

from .dtypes import COMPUTE_DTYPES, FLOAT32, as_dtype, find_dtype
from .errors import did_you_mean, wrong_type
from .policy import Policy
from .retired import instead_of


class ThreeDtypes(Protocol):
    """The interface of a ``jmp.Policy``."""

    @property
    def param_dtype(self) -> Any:
        """The dtype of the parameters."""

    @property
    def compute_dtype(self) -> Any:
        """The compute dtype."""

    @property
    def output_dtype(self) -> Any:
        """The dtype of the function's results."""


PolicyLike: TypeAlias = Policy | str | DTypeLike | ThreeDtypes
"""The values that `as_policy` accepts."""

_SHORT_KEYS = {"p": "params", "c": "compute", "o": "output"}
_KEYS = ("params", "compute", "output", "level", "matmul")


def parse_policy(text: str) -> Policy:
    """Returns the policy that a string describes.

    Args:
        text: ``"params=float32,compute=bfloat16,output=float32"``, with keys in any order, or one
            dtype, such as ``"bfloat16"`` or Keras' ``"mixed_bfloat16"``. Only ``compute`` is
            required. ``p``, ``c`` and ``o`` are short forms of the keys, as in jmp. The keys
            ``level`` and ``matmul`` (``matmul=float8_row``) are allowed as well. Dtypes have short
            names: ``f32``, ``f16``, ``bf16``.

    Returns:
        The policy.

    Raises:
        ValueError: A key or dtype is unknown, a key is given twice, ``compute`` is missing, or
            ``params`` is not float32 (parameters are kept in float32 and cast in the traced
            graph).

    Example:
        >>> parse_policy("params=float32,compute=bfloat16,output=float32").output_dtype
        dtype('float32')
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) == 1 and "=" not in parts[0]:
        return Policy(_only_dtype(parts[0]))
    found: dict[str, Any] = {}
    for part in parts:
        given, equals, value = (s.strip() for s in part.partition("="))
        key = _SHORT_KEYS.get(given, given)
        if key in found:
            raise ValueError(f"The policy {text!r} names {key!r} twice; leave one of them out.")
        if not equals or key not in _KEYS:
            raise ValueError(
                f"Cannot read {part!r} in the policy {text!r}."
                f"{instead_of(key) or did_you_mean(given, _KEYS)} Write "
                "'params=float32,compute=bfloat16,output=float32'."
            )
        is_dtype = key in _SHORT_KEYS.values()
        found[key] = as_dtype(value, key) if is_dtype else value
    if "compute" not in found:
        raise ValueError(f"The policy {text!r} names no compute dtype; add 'compute=bfloat16'.")
    dtypes = found.pop("compute"), found.pop("params", None), found.pop("output", None)
    return _build(*dtypes, **found)


def _only_dtype(text: str) -> np.dtype:
    """Returns the compute dtype of a policy string of one word."""
    # A mixed policy of Keras keeps variables in float32, as every `Policy` does.
    dtype = find_dtype(text.removeprefix("mixed_"))
    if dtype is None or dtype not in COMPUTE_DTYPES:
        nearest = did_you_mean(text, map(str, COMPUTE_DTYPES), cutoff=0.7)
        raise ValueError(
            "policy must be a compute dtype, 'float16' or 'bfloat16', or a string such as "
            f"'params=float32,compute=bfloat16,output=float32', got {text!r}.{nearest} "
            f"{_instead(text)}"
        )
    return dtype


def _instead(text: str) -> str:
    """Returns the fix to suggest for a word that is no policy."""
    name = text.removeprefix("jmp_autocast.").upper()
    if name in ("FLOAT8", "INT8"):
        return "Products run in 8 bits by policy=jmp_autocast.FP8."
    if name in ("BF16", "FP16", "FP8"):
        return f"Write policy=jmp_autocast.{name}, without quotes."
    if text.endswith((".toml", ".json", ".yaml", ".yml")) or "/" in text:
        return f"For a file write policy=jmp_autocast.Policy.load({text!r})."
    return "To run without casts, pass enabled=False."


def as_policy(value: Any) -> Policy:
    """Returns a `Policy` for a `Policy`, a compute dtype, a string or a ``jmp.Policy``.

    Raises:
        TypeError: ``value`` is none of the four.
        ValueError: The string, the dtype or the dtypes of the ``jmp.Policy`` are not supported.

    Example:
        >>> as_policy("bfloat16").compute_dtype
        dtype(bfloat16)
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        return parse_policy(value)
    if (dtype := find_dtype(value)) is not None:
        return Policy(dtype)
    dtypes = [getattr(value, f"{n}_dtype", None) for n in ("compute", "param", "output")]
    if not isinstance(value, type) and all(d is not None for d in dtypes):
        compute, param, output = (as_dtype(d, "policy") for d in dtypes)
        return _build(compute, param, output)
    raise wrong_type(
        "policy must be a jmp_autocast.Policy, a compute dtype such as jnp.bfloat16, a string such "
        "as 'params=float32,compute=bfloat16,output=float32', or a jmp.Policy",
        value,
        _fix(value),
    )


def _fix(value: Any) -> str:
    """Returns the fix to suggest for a value that is no policy."""
    if isinstance(value, type) and issubclass(value, Policy):
        return "That is the class: write policy=jmp_autocast.BF16, or Policy(jnp.bfloat16)."
    if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value)):
        return "Pass the arguments of the function in a second call: autocast(fn)(params, x)."
    if hasattr(value, "compute_dtype") and hasattr(value, "variable_dtype"):
        return f"Pass the name of the Keras policy: policy={value.name!r}."
    return "Write policy=jmp_autocast.BF16."


def _build(
    compute: np.dtype, param: np.dtype | None, output: np.dtype | None, **words: Any
) -> Policy:
    # A jmp policy may store parameters in 16 bits. Here they stay float32, because a bfloat16
    # parameter has 8 bits of precision and would lose every update below 1/512 of its value.
    if param is not None and param != FLOAT32:
        raise ValueError(
            f"params must be float32, got {param.name}: parameters are kept in float32 and cast "
            "once in the traced graph."
        )
    return Policy(compute, output_dtype=output, **words)
