"""The texts that explain each reason code, for reports and for ``docs/reasons.md``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from ...interpreters.plan.data import ReasonCode


class Explanation(NamedTuple):
    """The explanation of a reason code, in Markdown whose only markup is code spans.

    Args:
        says: Why the equation has its dtypes.
        otherwise: How to change the dtypes, ``""`` if there is no way.
    """

    says: str
    otherwise: str = ""


@functools.cache
def explanations() -> Mapping[ReasonCode, Explanation]:
    """Returns the explanation of each code, from ``reasons.toml``."""
    text = (resources.files(__package__ or "") / "reasons.toml").read_text("utf-8")
    return {ReasonCode(code): Explanation(**texts) for code, texts in tomllib.loads(text).items()}
