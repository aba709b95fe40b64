"""What the code of each reason says: the text of docs/reasons.md and of the HTML report."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from ...interpreters.plan.reasons import ReasonCode


class Explanation(NamedTuple):
    """What a code says, in Markdown that uses code spans alone.

    Args:
        says: Why the equation runs in its dtypes.
        otherwise: What to do to have it otherwise, ``""`` where nothing can be done or need be.
    """

    says: str
    otherwise: str = ""


@functools.cache
def explanations() -> Mapping[ReasonCode, Explanation]:
    """Returns what each code says. The texts are no code: they stand beside those of the page."""
    text = (resources.files(__package__ or "") / "reasons.toml").read_text("utf-8")
    return {ReasonCode(code): Explanation(**said) for code, said in tomllib.loads(text).items()}
