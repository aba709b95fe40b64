"""The names of dtypes: HLO's and ours."""

from __future__ import annotations

import re

_LETTERS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def dtype_name(name: str) -> str:
    """Returns NumPy's name of a dtype for HLO's; any other text as it is.

    Example:
        >>> [dtype_name(name) for name in ("bf16", "f8e4m3fn", "s8", "pred", "token")]
        ['bfloat16', 'float8_e4m3fn', 'int8', 'bool', 'token']
    """
    if name == "pred":
        return "bool"
    found = re.fullmatch(r"(bf|[fsuc])(\d+)(e\w+)?", name)
    if found is None:
        return name
    return f"{_LETTERS[found[1]]}{found[2]}{'_' + found[3] if found[3] else ''}"
