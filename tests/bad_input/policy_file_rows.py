"""Wrong uses of `Policy.save` and `Policy.load`; wrong files are in `wrong_policy_files`."""

import pathlib

from jmp_autocast import CastPolicy, Policy

from .row import Row

PROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"


def _file(mistake, call, error, *parts):
    return Row("Policy", mistake, call, error, *parts)


ROWS = [
    _file(
        "a rule function in a file",
        lambda w: w.policy.with_rules({"exp": lambda eqn: CastPolicy.KEEP}).save("policy.toml"),
        TypeError,
        "rule for primitive 'exp' | <lambda> | holds only data | a policy's name instead",
    ),
    _file(
        "another TOML file",
        lambda w: Policy.load(PROJECT),
        ValueError,
        "Policy file | pyproject.toml | version must be 2, got None | Write: version = 2",
    ),
]
