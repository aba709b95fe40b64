"""The texts about each reason, for reports and for the page on reasons."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from ...interpreters.plan.data import ReasonCode


class Explanation(NamedTuple):
    """The text about a reason code, in Markdown with code spans alone.

    Args:
        says: The reason of the dtypes of the equation.
        otherwise: The way to change them, ``""`` without one.
    """

    says: str
    otherwise: str = ""


@functools.cache
def explanations() -> Mapping[ReasonCode, Explanation]:
    """Returns the explanation of each code, from the file beside this one."""
    text = (resources.files(__package__ or "") / "reasons.toml").read_text("utf-8")
    return {ReasonCode(code): Explanation(**texts) for code, texts in tomllib.loads(text).items()}
