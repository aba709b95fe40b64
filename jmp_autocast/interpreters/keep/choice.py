"""The user's choice of residuals: how many bytes are kept, and which scopes are left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ...policies.errors import did_you_mean, wrong_type
from ...policies.patterns import check_pattern, match_depth
from ...scopes import read_mark

Residuals: TypeAlias = Literal["declared", "recompute", "auto"] | float
"""How much is kept for the backward pass: a word, or a share of the bytes that JAX keeps."""

_WORDS = ("declared", "recompute", "auto")


@dataclasses.dataclass(frozen=True)
class ResidualChoice:
    """The checked options of `keep_less`.

    Args:
        residuals: ``"recompute"`` keeps as few bytes as possible in the whole program, ``"auto"``
            in the bodies of loops only. A share keeps at most that share of the bytes, with as
            little recomputation as possible. ``"declared"`` changes nothing.
        keep_scopes: Patterns of scopes in which nothing is computed again.
    """

    residuals: Residuals
    keep_scopes: tuple[str, ...] = ()

    @property
    def is_off(self) -> bool:
        """Whether the program stays as it is."""
        return self.residuals == "declared"

    @property
    def share(self) -> float:
        """The share of the bytes that may be kept; 0 means as few bytes as possible."""
        return 0.0 if isinstance(self.residuals, str) else self.residuals

    @property
    def loops_only(self) -> bool:
        """Whether only the bodies of loops are planned."""
        # The reasons were measured under ``jit``. XLA compiles the forward and the backward pass of
        # a scan as two loops, and cannot recompute across them. Outside of loops, XLA recomputes
        # cheap ops by itself and merges the recomputation of this pass: the TPU compiler gave a ViT
        # the same 417 MB and 3.3 GB of traffic with and without it. Optimization barriers raised
        # both in each program tried (GPT: 4.6 to 7.0 GB, JAX 0.10.2).
        return self.residuals == "auto"

    def excludes(self, scope: Sequence[str]) -> bool:
        """Returns whether nothing is computed again in a scope.

        Args:
            scope: The names of the enclosing scopes, outermost first.
        """
        # The scopes that `autocast` adds as marks are not names of the user.
        names = [name for name in scope if read_mark(name) is None]
        return any(match_depth(pattern, names) is not None for pattern in self.keep_scopes)


DECLARED = ResidualChoice("declared")


def as_choice(residuals: Any, keep_scopes: Any = ()) -> ResidualChoice:
    """Checks the arguments of `keep_less`.

    Args:
        residuals: ``"declared"``, ``"recompute"``, ``"auto"``, or a share from 0 to 1.
        keep_scopes: Patterns of scopes.

    Raises:
        TypeError: ``residuals`` is neither a string nor a number, or ``keep_scopes`` is not a
            sequence of strings.
        ValueError: ``residuals`` is an unknown word, the share is not from 0 to 1, or
            ``keep_scopes`` is given although ``residuals`` is ``"declared"``.

    Example:
        >>> as_choice(0.5, ["*/head"])
        ResidualChoice(residuals=0.5, keep_scopes=('*/head',))
    """
    if isinstance(residuals, str):
        if residuals not in _WORDS:
            raise ValueError(
                f"residuals must be {', '.join(map(repr, _WORDS))} or a share from 0 to 1, got "
                f"{residuals!r}.{did_you_mean(residuals, _WORDS)}"
            )
    elif isinstance(residuals, bool) or not isinstance(residuals, int | float):
        raise wrong_type(
            "residuals takes a word or a share from 0 to 1", residuals, 'Write residuals="auto".'
        )
    elif not 0 <= residuals <= 1:  # NaN fails the comparison
        raise ValueError(
            f"residuals={residuals!r} is not a share: it must be from 0 (as little as possible is "
            "kept) to 1 (what the program keeps now)."
        )
    if isinstance(keep_scopes, str) or not isinstance(keep_scopes, Sequence):
        fix = "Write keep_scopes=('*/head',)."
        raise wrong_type("keep_scopes takes a sequence of scope patterns", keep_scopes, fix)
    patterns = tuple(check_pattern(pattern) for pattern in keep_scopes)
    if patterns and residuals == "declared":
        raise ValueError(
            f"keep_scopes={patterns!r} excludes scopes from recomputation, and nothing is computed "
            'again with residuals="declared". Choose residuals="auto", or leave keep_scopes out.'
        )
    return ResidualChoice(residuals if isinstance(residuals, str) else float(residuals), patterns)
