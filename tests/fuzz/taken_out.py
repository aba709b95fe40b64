"""Whether the fuzzer finds each kind once its row is taken out.

For each kind the same programs run twice: with nothing taken out they find nothing, and with the
row (or the guard) of the kind taken out they do, where nothing says that 16 bits are for products
alone. The programs are judged by their values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest

from jmp_autocast.call import arguments
from jmp_autocast.interpreters import compat
from jmp_autocast.interpreters.plan import consumers, equation, need_sweep, needs, planner
from jmp_autocast.interpreters.plan.data import Request, Source
from jmp_autocast.interpreters.plan.needs import Need
from jmp_autocast.interpreters.primitives import reading

from . import dangers

TakesOut: TypeAlias = Callable[[pytest.MonkeyPatch], None]


def without_need(need: Need) -> TakesOut:
    """A row of the needs."""

    def take_out(patch: pytest.MonkeyPatch) -> None:
        rows = needs.REQUESTED.items()
        requested = {name: [r for r in found if r.need != need] for name, found in rows}
        patch.setattr(need_sweep, "REQUESTED", requested)

    return take_out


def without_the_rule(patch: pytest.MonkeyPatch) -> None:
    """Every value counts as one that leads to a product."""
    without_link("leads_to_no_product")(patch)
    leads = lambda eqn, marks, need, at: consumers.reads(eqn, marks, need | Need.LEADS, at)
    patch.setattr(need_sweep, "reads", leads)


def _derivatives_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumers, "derivative_leaves", lambda *args: False)
    patch.setattr(equation, "derivative_leaves", lambda *args: False)


def without_link(name: str) -> TakesOut:
    """A function of `equation` that decides for float32."""
    return lambda patch: patch.setattr(equation, name, lambda *args: None)


def _calls_know_no_needs(patch: pytest.MonkeyPatch) -> None:
    # What is needed of a result neither leaves the body that reads it nor enters the one that
    # makes it.
    patch.setattr(need_sweep, "reads_of", lambda found: {})
    patch.setattr(planner, "Request", lambda needs: Request())


def _needs_do_not_go_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(need_sweep, "read_by_the_next", lambda body, reads: {})


def _first_argument(paths: Sequence[str], known: Any, traced: Any) -> list[Source]:
    return [Source.PARAM if path.split("/")[0] == "0" else Source.DATA for path in paths]


TAKEN_OUT: Mapping[str, TakesOut] = {
    "derivatives": _derivatives_stay,
    "roots": without_need(Need.STEEP),
    "exponentials": without_link("_needs_digits"),
    "factors": without_need(Need.SHARP),
    "ranked": without_need(Need.SHARP),
    "distances": without_need(Need.EXPANDED),
    "variances": without_need(Need.EXPANDED),
    "stencils": without_link("_needs_digits"),
    "decompositions": without_need(Need.DECOMPOSED),
    "chains": without_need(Need.DECOMPOSED),
    "few": without_link("_cannot_pay"),
    "ramps": without_link("_needs_digits"),
    "requests": lambda patch: patch.setattr(reading, "requested_precision", lambda eqn: None),
    "contexts": lambda patch: patch.setattr(
        compat, "float64_for", lambda avals: contextlib.nullcontext()
    ),
    "calls": _calls_know_no_needs,
    "rounds": _needs_do_not_go_round,
    "arguments": lambda patch: patch.setattr(arguments, "with_weights", _first_argument),
}
"""From a kind to what takes its row out of the package, in this process."""


def first_found(kind: str, numbers: Sequence[int], takes_out: TakesOut | None) -> int | None:
    """Returns the number of the first program of a kind that is wrong; None if none is."""
    with pytest.MonkeyPatch.context() as patch:
        if takes_out is not None:
            without_the_rule(patch)
            takes_out(patch)
        return next((i for i in numbers if dangers.run(0, i, kind)[1]), None)
