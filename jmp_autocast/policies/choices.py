"""The words that a policy's options may be."""

from __future__ import annotations

from typing import Literal, get_args

Level = Literal["tensor_cores", "o1", "compute"]
DotOutput = Literal["compute", "consumer"]
LEVELS: tuple[Level, ...] = get_args(Level)
DOT_OUTPUTS: tuple[DotOutput, ...] = get_args(DotOutput)
