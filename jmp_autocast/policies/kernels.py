"""Kernels by policy: which functions run with 16-bit operands, by name or pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from .choices import check_choice
from .errors import wrong_type

KernelWord = Literal["compute", "compute_or_declared", "declared"]
KERNEL_WORDS: tuple[KernelWord, ...] = get_args(KernelWord)


class Known(NamedTuple):
    """A kernel that many programs use.

    Args:
        patterns: Of functions, as in `Policy.with_kernels`.
        source: Where it says that it takes 16-bit operands.
    """

    patterns: tuple[str, ...]
    source: str


_PALLAS = "jax.experimental.pallas.ops"

KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "splash": Known(
            ("*splash_attention*",),
            f"{_PALLAS}.tpu.splash_attention: multiplies in float32 inside, returns q's dtype",
        ),
        "flash": Known(
            (
                f"{_PALLAS}.tpu.flash_attention.*",
                f"{_PALLAS}.gpu.attention.mha",
                "*jax_flash_attention*",
                "*gpu_pallas_flash*",
            ),
            f"{_PALLAS}.tpu.flash_attention and gpu.attention: accumulate in float32",
        ),
        # MaxText's own reads the dtypes of its operands before it makes the function with a rule,
        # so that the function around it is named, as its callers find it.
        "megablox": Known(
            (
                f"{_PALLAS}.tpu.megablox.*",
                "maxtext.kernels.megablox.gmm",
                "MaxText.kernels.megablox.gmm",
            ),
            f"{_PALLAS}.tpu.megablox.common: supports_bfloat16_matmul; accumulates in float32",
        ),
        "attention": Known(
            ("jax.nn.dot_product_attention",),
            "jax.nn.dot_product_attention: softmax in float32; cuDNN's takes 16 bits alone",
        ),
        "tokamax": Known(
            (
                "tokamax.dot_product_attention",
                "tokamax.ragged_dot",
                "tokamax.ragged_dot_general",
                "tokamax.gated_linear_unit",
                "tokamax.triangle_multiplication",
            ),
            "tokamax: its operations take the dtypes of their operands",
        ),
        "ragged_dot": Known(
            ("jax.lax.ragged_dot", "jax.lax.ragged_dot_general"),
            "jax.lax.ragged_dot: a product, which is lowered in any case",
        ),
    }
)
"""Kernels by the name that a policy may call them by."""

AS_BY_HAND: tuple[tuple[str, KernelWord], ...] = tuple((name, "compute") for name in KNOWN)
"""All known kernels with 16-bit operands."""


def check_kernel(name: object, word: object) -> tuple[str, str]:
    """Returns a rule for a kernel.

    Raises:
        TypeError: The name is no string, or empty.
        ValueError: There is no such word.
    """
    if not isinstance(name, str) or not name:
        fix = f"Write one of {', '.join(map(repr, KNOWN))}, or a pattern such as '*my_attention*'."
        raise wrong_type("A kernel is given by the name or pattern of a function", name, fix)
    check_choice(f"kernels[{name!r}]", word, KERNEL_WORDS)
    return name, str(word)


def kernel_rules(
    kernels: Sequence[tuple[str, str]], names: Sequence[str], scope: Sequence[str]
) -> list[tuple[str, str]]:
    """Returns the rules of a policy for a function, of which the last holds.

    Args:
        kernels: The rules of the policy.
        names: The names of the function: its own, and with its module.
        scope: The scopes that it is called in, outermost first.

    Example:
        >>> rules = (("splash", "compute"), ("*/decoder/*", "declared"))
        >>> kernel_rules(rules, ["jax.splash_attention.f"], ["net", "decoder"])
        [('splash', 'compute'), ('*/decoder/*', 'declared')]
    """
    texts = [*names, *("/".join(("", *scope, name)) for name in names)]

    def matches(name: str) -> bool:
        patterns = KNOWN[name].patterns if name in KNOWN else (name,)
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in texts)

    return [(name, word) for name, word in kernels if matches(name)]


def named_functions(kernels: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the dotted names among the patterns: of functions that are found by them.

    Example:
        >>> named_functions((("ragged_dot", "compute"), ("*flash*", "compute")))
        ('jax.lax.ragged_dot', 'jax.lax.ragged_dot_general')
    """
    patterns = [p for n, _ in kernels for p in (KNOWN[n].patterns if n in KNOWN else (n,))]
    return tuple(p for p in patterns if "." in p and all(s.isidentifier() for s in p.split(".")))
