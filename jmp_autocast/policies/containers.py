"""The tuples and mappings that a policy is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import wrong_type

_EXAMPLES = {
    "rules": "'tanh': CastPolicy.FP32",
    "scopes": "'*/LayerNorm_*': 'float32'",
    "kernels": "'splash': 'compute'",
    "storage": "'*cache*': 'compute'",
}


def as_tuples(value: Any, argument: str, length: int) -> Sequence[tuple[Any, ...]]:
    """Returns a tuple of tuples of one length.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == length for p in value):
        return value
    what = {2: "pairs", 3: "triples"}[length]
    calls = {"precisions": "precision(...)"}
    call = calls.get(argument, f"{argument.removeprefix('scoped_')}({{...}})")
    fix = f"Use Policy(...).with_{call}."
    raise wrong_type(f"{argument} must be a tuple of {what}", value, fix)


def as_mapping(value: Any, argument: str) -> Mapping[Any, Any]:
    """Returns a mapping.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, Mapping):
        fix = f"Write with_{argument}({{{_EXAMPLES[argument]}}})."
        raise wrong_type(f"{argument} must be a mapping", value, fix)
    return value


def as_words(value: Any, argument: str) -> Mapping[Any, Any]:
    """Returns a mapping to words; a name, or several, stand for ``"compute"``.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple | set | frozenset):
        value = dict.fromkeys(value, "compute")
    return as_mapping(value, argument)
