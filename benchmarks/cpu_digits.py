"""Errors of products and their gradients on a CPU with bfloat16 units and on one without.

    python benchmarks/cpu_digits.py           # a table, in a minute
    python benchmarks/cpu_digits.py --here    # this CPU alone, as JSON

Each column is a process of its own: ``--xla_cpu_max_isa`` has a CPU with units do what one without
does. An error is the norm of what is off, relative to the result in float64 of the operands rounded
to bfloat16; that of a product is followed by those of the gradients of an activation and a weight.
Those of `autocast` are the largest of all levels but `"by_hand"`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from jmp_autocast import Policy, autocast, cpu_kernels
from jmp_autocast.policies.choices import LEVELS

BY_HAND = "by hand"
# Level "by_hand" rounds the gradients of weights.
_LEVELS = tuple(level for level in LEVELS if level != "by_hand")
# As `xla_cpu_max_isa` names them; none of them has bfloat16 units.
WITHOUT_UNITS = ("AVX2", "AVX512", "AVX512_VNNI")

_N = 512
_conv = functools.partial(
    lax.conv_general_dilated,
    window_strides=(1, 1),
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)
_patches = functools.partial(_conv, window_strides=(4, 4), padding="VALID")
_transposed = functools.partial(_conv, lhs_dilation=(2, 2), padding=((1, 2), (1, 2)))
_in_groups = functools.partial(_conv, feature_group_count=4)
SPELLINGS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "x @ w": (jnp.matmul, (4, 12, _N), (_N, 40)),
    "(x @ w).T": (lambda x, w: (x @ w).T, (48, _N), (_N, 40)),
    "x.T @ w.T": (lambda x, w: x.T @ w.T, (_N, 48), (40, _N)),
    "x @ w.T": (lambda x, w: x @ w.T, (48, _N), (40, _N)),
    "x @ vector": (jnp.matmul, (48, _N), (_N,)),
    "scores": (functools.partial(jnp.einsum, "bthk,bshk->bhts"), (2, 8, 3, _N), (2, 9, 3, _N)),
    "1 x 1": (_conv, (2, 8, 8, 64), (1, 1, 64, 32)),
    "patches": (_patches, (2, 16, 16, 8), (4, 4, 8, 32)),
    "3 x 3": (_conv, (2, 8, 8, 32), (3, 3, 32, 32)),
    "3 x 3, transposed": (_transposed, (2, 8, 8, 32), (3, 3, 32, 32)),
    "3 x 3, groups": (_in_groups, (2, 8, 8, 32), (3, 3, 8, 32)),
}
Errors = dict[str, dict[str, list[float]]]


def errors() -> Errors:
    """Returns for each spelling and level the errors of a product and of its two gradients."""
    return {name: _errors_of(*spelling) for name, spelling in SPELLINGS.items()}


def errors_under(isa: str | None) -> Errors:
    """Returns the `errors` of a CPU that has no newer instructions, None for the one at hand.

    Args:
        isa: A value of `xla_cpu_max_isa`.
    """
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "xla_cpu_max_isa" not in f]
    flags += [f"--xla_cpu_max_isa={isa}"] if isa else []
    done = subprocess.run(
        [sys.executable, __file__, "--here"],
        env=os.environ | {"XLA_FLAGS": " ".join(flags)},
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout)


def _errors_of(
    fn: Callable[..., Any], left: tuple[int, ...], right: tuple[int, ...]
) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in (left, right)]
    cotangent = rng.standard_normal(jax.eval_shape(fn, *operands).shape).astype(jnp.bfloat16)
    with jax.enable_x64(True):
        exact = _both_directions(fn, cotangent.astype(float), *(x.astype(float) for x in operands))
    # An activation that is stored in 16 bits, and a float32 weight.
    mixed = [operands[0], operands[1].astype(np.float32)]

    def errors(fn: Callable[..., Any], operands: list[Any]) -> list[float]:
        found = (np.asarray(x, float) for x in _both_directions(fn, cotangent, *operands))
        norm = np.linalg.norm
        return [float(norm(f - e) / norm(e)) for f, e in zip(found, exact, strict=True)]

    rows = {
        level: errors(
            autocast(fn, Policy(jnp.bfloat16, level=level), output_dtype="computed"), mixed
        )
        for level in LEVELS
    }
    return rows | {BY_HAND: errors(fn, operands)}


def _both_directions(fn: Callable[..., Any], cotangent: Any, *operands: Any) -> list[np.ndarray]:
    """Returns a product and its gradients, of one program."""

    def run(cotangent: Any, *operands: Any) -> Any:
        out, pullback = jax.vjp(lambda x, w: fn(x.astype(w.dtype), w), *operands)
        return out, *pullback(cotangent.astype(out.dtype))

    return [np.asarray(x) for x in jax.jit(run)(cotangent, *operands)]


def main() -> None:
    """Prints the errors."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="this CPU alone, as JSON")
    if parser.parse_args().here:
        print(json.dumps(errors()))
        return
    columns = {isa or "this CPU": errors_under(isa) for isa in (None, *WITHOUT_UNITS)}
    print(f"JAX {jax.__version__}: {cpu_kernels.cpu_kernels().reason}\n")
    print(f"|  | {' | '.join(columns)} | by hand |\n|{'---|' * (len(columns) + 2)}")
    for name in SPELLINGS:
        cells = [np.max([c[name][level] for level in _LEVELS], axis=0) for c in columns.values()]
        cells.append(columns["this CPU"][name][BY_HAND])
        text = (", ".join(f"{error:.2g}" for error in cell) for cell in cells)
        print(f"| {name} | {' | '.join(text)} |")


if __name__ == "__main__":
    main()
