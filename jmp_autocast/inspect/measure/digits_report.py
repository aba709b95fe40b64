"""`Digits`: how many digits of a program's values are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..export import Exported, counted, cut, place, table
from .measured import MeasuredEquation, scopes_of

# Twenty rows fit on a screen. The report holds all.
_SHOWN = 20
_FEW = 1.0
"""An equation that loses as many digits is one to look at."""


@dataclasses.dataclass(frozen=True, slots=True)
class DigitsRow(MeasuredEquation):
    """How many digits of what one equation makes are right.

    Args:
        scope: The enclosing ``jax.named_scope`` names, joined by ``/``.
        source: The user's source line.
        primitive: The primitive's name.
        inside: The loops, branches and device maps around it, outermost first.
        backward: It belongs to a backward pass that JAX made.
        shapes: The shape of each float result.
        dtypes: The dtype of each float result.
        digits: The decimal digits of the whole array, as of a vector, in the worst run.
        fewest: Those of the element that has the fewest.
        lost: How many fewer they are than those of what the equation reads: where digits cancel.
        runs: How often it ran.
        index: The position in program order.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import significant_digits
        >>> found = significant_digits(lambda x: (x + 1e4) - 1e4, jnp.float32(0.1))
        >>> [(row.primitive, row.digits > 6, row.lost > 3) for row in found.rows]
        [('add', True, False), ('sub', False, True)]
    """

    digits: float
    fewest: float
    lost: float
    runs: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class OutputDigits:
    """How many digits of an output are right.

    Args:
        digits: The decimal digits of the whole array, as of a vector.
        fewest: Those of the element that has the fewest.
        dtype: Its dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import significant_digits
        >>> significant_digits(jnp.square, jnp.float32(3.0)).outputs[0]
        OutputDigits(digits=7.2, fewest=7.2, dtype='float32')
    """

    digits: float
    fewest: float
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class ScopeDigits:
    """The fewest digits in a scope, and what is lost there.

    Args:
        scope: The names of the scope, joined by ``/``.
        equations: How many equations it has.
        digits: The fewest digits of what one of them makes.
        lost: The most that one of them loses.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import significant_digits
        >>> def f(x):
        ...     with jax.named_scope("difference"):
        ...         return (x + 1e4) - 1e4
        >>> [each.scope for each in significant_digits(f, jnp.float32(0.1)).by_scope()]
        ['difference']
    """

    scope: str
    equations: int
    digits: float
    lost: float


@dataclasses.dataclass(frozen=True)
class Digits(Exported):
    """What `jmp_autocast.significant_digits` returns.

    Args:
        name: The function's name.
        samples: How often it ran.
        rows: A row per equation that makes floats, in program order.
        outputs: The digits of the float outputs, by their position.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import significant_digits
        >>> significant_digits(lambda x: x * 3.0 - x * 3.0, jnp.float32(0.1)).summary
        '<lambda>: 0 digits are right in the worst of 1 output (8 samples)'
    """

    name: str
    samples: int
    rows: tuple[DigitsRow, ...]
    outputs: Mapping[int, OutputDigits]

    @property
    def summary(self) -> str:
        """The report in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import significant_digits
            >>> significant_digits(jnp.square, jnp.float32(3.0)).summary
            'square: 7.2 digits are right in the worst of 1 output (8 samples)'
        """
        worst = min(each.digits for each in self.outputs.values())
        outputs = counted(len(self.outputs), "output")
        line = f"{self.name}: {worst:.3g} digits are right in the worst of {outputs}"
        return cut(f"{line} ({self.samples} samples)")

    @property
    def losses(self) -> tuple[DigitsRow, ...]:
        """The equations that lose a digit or more, the one that loses most first.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import significant_digits
            >>> found = significant_digits(lambda x: (x + 1e4) - 1e4, jnp.float32(0.1))
            >>> [row.primitive for row in found.losses]
            ['sub']
        """
        found = [row for row in self.rows if row.lost >= _FEW]
        return tuple(sorted(found, key=lambda row: -row.lost))

    def by_scope(self, depth: int | None = None) -> tuple[ScopeDigits, ...]:
        """Returns the fewest digits in each scope, in program order.

        Args:
            depth: How many names of a scope count: 1 for the parts of the outermost module. None
                for all.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import significant_digits
            >>> def f(x):
            ...     with jax.named_scope("layer"), jax.named_scope("norm"):
            ...         return x / jnp.sum(x * x)
            >>> [each.scope for each in significant_digits(f, jnp.ones(3)).by_scope(depth=1)]
            ['layer']
        """
        return tuple(
            ScopeDigits(name, len(rows), min(r.digits for r in rows), max(r.lost for r in rows))
            for name, rows in scopes_of(self.rows, depth).items()
        )

    def __str__(self) -> str:
        """Returns the summary, what loses digits, the scopes, and the outputs."""
        numbers = {"digits": ">7.1f", "fewest": ">7.1f", "lost": ">5.1f"}

        def cells(row: DigitsRow) -> list[Any]:
            where = place(row.primitive, *row.dtypes[:1], row.scope, source=row.source)
            return [row.digits, row.fewest, row.lost, where]

        lines = [self.summary]
        if losses := self.losses:
            more = "more; losses holds all"
            lines += ["", *table({**numbers, "equation": ""}, losses, cells, _SHOWN, more)]
        scopes = self.by_scope()
        if len(scopes) > 1:
            columns = {"digits": ">7.1f", "lost": ">5.1f", "scope": ""}
            of_scope = lambda each: [each.digits, each.lost, each.scope or "(no scope)"]  # noqa: E731
            more = "more; by_scope() has all"
            lines += ["", *table(columns, scopes, of_scope, _SHOWN, more)]
        columns = {"digits": ">7.1f", "fewest": ">7.1f", "output": ""}
        of_output = lambda item: [item[1].digits, item[1].fewest, f"{item[0]} {item[1].dtype}"]  # noqa: E731
        lines += ["", *table(columns, [*self.outputs.items()], of_output, _SHOWN)]
        return "\n".join(lines)
