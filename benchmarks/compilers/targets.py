"""The chips to compile for, and where their compilers come from.

Both compilers run on a machine that has no such chip: `libtpu` holds the TPU's, the CUDA plugin of
JAX the GPU's. A GPU's is told about the chip by a text that XLA calls a target configuration.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any

CONFIGURATIONS = pathlib.Path(__file__).with_name("gpu_targets")

TPUS = {
    "v5e": {1: "2x2", 4: "2x2", 16: "4x4", 256: "16x16"},
    "v6e": {1: "2x2", 4: "2x2", 16: "4x4", 256: "16x16"},
    "v5p": {1: "2x2x1", 4: "2x2x1", 16: "2x2x4", 256: "4x8x8"},
}
"""The smallest topology with so many chips; `v5e` has no smaller one than 2x2 with all links."""

GPUS = ("h100", "b200", "a100")

TARGETS = (*TPUS, *GPUS)


class NotInstalled(Exception):
    """The compiler of a target is not installed; the message says how to install it."""


def prepare_environment() -> None:
    """Sets what the compilers read from the environment; before JAX is imported."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        # libtpu asks Google's metadata server what machine it is on, and locks the chips.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # Without a GPU no kernel can be timed; level 0 takes the default of each.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def check_installed(target: str) -> None:
    """Raises an error where the compiler of a target is not installed."""
    module, extra = (
        ("libtpu", "bench-tpu") if target in TPUS else ("jax_cuda12_plugin", "bench-gpu")
    )
    if importlib.util.find_spec(module) is None:
        raise NotInstalled(
            f"No compiler for {target}: {module} is not installed. Run: "
            f'pip install "jmp-autocast[{extra}]"'
        )


@functools.cache
def devices(target: str, chips: int = 1) -> Sequence[Any]:
    """Returns the devices of a target, as the compiler describes them.

    Args:
        target: One of `TARGETS`.
        chips: How many; a TPU needs a topology in `TPUS`.
    """
    check_installed(target)
    from jax.experimental import topologies

    if target in TPUS:
        if chips not in TPUS[target]:
            known = ", ".join(map(str, TPUS[target]))
            raise ValueError(f"No topology of {target} with {chips} chips is known, only {known}.")
        name = f"{target}:{TPUS[target][chips]}"
        found = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    else:
        # Without `topology`, "Cannot create topology without an explicit topology shape".
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=(CONFIGURATIONS / f"{target}.txtpb").read_text(),
            topology=f"1x1x{chips}",
        ).devices
    return found[:chips]
