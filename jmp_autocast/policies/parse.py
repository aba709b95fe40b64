"""Policies from strings and from `jmp`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .dtypes import FLOAT32, as_compute_dtype, as_dtype
from .policy import Policy
from .registry import did_you_mean

_KEYS = {"params": "params", "p": "params", "compute": "compute", "c": "compute"}
_KEYS |= {"output": "output", "o": "output"}
_CHOICES = ("level", "dot_output")
_SHORT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def parse_policy(text: str) -> Policy:
    """Returns the policy that a string means.

    Args:
        text: ``"params=float32,compute=bfloat16,output=float32"``, keys in any order and any of
            them left out but ``compute``; ``p``, ``c``, ``o`` and ``f32``, ``f16``, ``bf16`` are
            short forms, as in jmp; ``level`` and ``dot_output`` may follow; or one dtype,
            ``"bfloat16"``.

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
        return Policy(as_compute_dtype(_SHORT.get(parts[0], parts[0])))
    found: dict[str, np.dtype] = {}
    choices: dict[str, Any] = {}
    for part in parts:
        key, equals, value = (s.strip() for s in part.partition("="))
        # Of two values for one key the reader expects one and gets the other.
        if _KEYS.get(key, key) in {**found, **choices}:
            raise ValueError(
                f"The policy {text!r} names {_KEYS.get(key, key)!r} twice; leave one of them out."
            )
        if equals and key in _CHOICES:
            choices[key] = value
            continue
        if not equals or key not in _KEYS:
            raise ValueError(
                f"Cannot read {part!r} in the policy {text!r}."
                f"{did_you_mean(key, (*_KEYS, *_CHOICES))} Write "
                "'params=float32,compute=bfloat16,output=float32'."
            )
        found[_KEYS[key]] = as_dtype(_SHORT.get(value, value), _KEYS[key])
    if "compute" not in found:
        raise ValueError(f"The policy {text!r} names no compute dtype; add 'compute=bfloat16'.")
    policy = _build(found["compute"], found.get("params", FLOAT32), found.get("output"))
    return dataclasses.replace(policy, **choices)


def as_policy(value: Any) -> Policy:
    """Returns the policy meant by a `Policy`, a string or a ``jmp.Policy``.

    Raises:
        TypeError: It is none of the three.
        ValueError: The string or the dtypes of the ``jmp.Policy`` are not supported.

    Example:
        >>> as_policy("bfloat16").compute_dtype
        dtype(bfloat16)
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        return parse_policy(value)
    dtypes = [getattr(value, f"{n}_dtype", None) for n in ("compute", "param", "output")]
    if not isinstance(value, type) and all(d is not None for d in dtypes):
        compute, param, output = (as_dtype(d, "policy") for d in dtypes)
        return _build(compute, param, output)
    raise TypeError(
        "policy must be a jmp_autocast.Policy, a string such as "
        "'params=float32,compute=bfloat16,output=float32', or a jmp.Policy, got "
        f"{value!r} of type {type(value).__name__}."
    )


def _build(compute: np.dtype, param: np.dtype, output: np.dtype | None) -> Policy:
    # jmp's policies may cast the parameters themselves; here a float32 copy is what updates add to.
    if param != FLOAT32:
        raise ValueError(
            f"params must be float32, got {param.name}: parameters are kept in float32 and cast "
            "once in the traced graph."
        )
    return Policy(as_compute_dtype(compute), output)
