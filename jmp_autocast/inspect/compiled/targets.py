"""Compilers for devices that are not there: which they are, and how they are asked.

`libtpu` holds the TPU's, the CUDA plugin of JAX the GPU's. A GPU's is told about the chip by a text
that XLA calls a target configuration.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from ...interpreters.compat.private_names import private
from ...policies.errors import did_you_mean
from .hlo import UnreadableError

TPUS: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "v5e": {1: "2x2", 4: "2x2", 16: "4x4", 256: "16x16"},
        "v6e": {1: "2x2", 4: "2x2", 16: "4x4", 256: "16x16"},
        "v5p": {1: "2x2x1", 4: "2x2x1", 16: "2x2x4", 256: "4x8x8"},
    }
)
"""The smallest topology with so many chips; `v5e` has no smaller one than 2x2 with all links."""

GPUS = ("h100", "b200", "a100")

TARGETS = (*TPUS, *GPUS)

# Without a GPU no kernel can be timed; level 0 takes the default of each.
GPU_OPTIONS: Mapping[str, Any] = MappingProxyType({"xla_gpu_autotune_level": 0})

# libtpu asks Google's metadata server what machine it is on, and locks the chips.
_SETTINGS = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class NotInstalled(Exception):
    """The compiler of a target is not installed or not loaded; the message says what to do."""


def parse_target(device: str) -> tuple[str, str | None]:
    """Returns the target and the topology that a user names: ``"v5e:2x2"``.

    Raises:
        UnreadableError: It is no target whose compiler runs without it.

    Example:
        >>> parse_target("v5e:4x4"), parse_target("H100")
        (('v5e', '4x4'), ('h100', None))
    """
    name, colon, topology = device.strip().lower().partition(":")
    if name not in TARGETS:
        raise UnreadableError(
            f"device={device!r} is no device whose compiler runs without it. Known are "
            f"{', '.join(TARGETS)}, TPUs also with a topology (v5e:2x2)."
            f"{did_you_mean(name, TARGETS)}"
        )
    if colon and (name not in TPUS or not re.fullmatch(r"\d+(x\d+){1,2}", topology)):
        raise UnreadableError(
            f"device={device!r}: {topology!r} is no topology of {name}. Write "
            + (f"{name}:{TPUS[name][4]}, or {name} alone." if name in TPUS else f"{name} alone.")
        )
    return name, topology or None


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


@functools.lru_cache(maxsize=16)
def devices(target: str, chips: int = 1, topology: str | None = None) -> Sequence[Any]:
    """Returns the devices of a target, as the compiler describes them.

    Args:
        target: One of `TARGETS`.
        chips: How many; a TPU needs a topology in `TPUS`.
        topology: That of a TPU, instead of the smallest with so many chips.
    """
    check_installed(target)
    describe = private("jax.experimental.topologies.get_topology_desc")
    if target in TPUS:
        if topology is None and chips not in TPUS[target]:
            known = ", ".join(map(str, TPUS[target]))
            raise UnreadableError(
                f"No topology of {target} with {chips} chips is known, only {known}."
            )
        name = f"{target}:{topology or TPUS[target][chips]}"
        with _settings():
            found = describe(platform="tpu", topology_name=name).devices
    else:
        folder = resources.files(__package__ or "") / "gpu_targets"
        # Without `topology`, "Cannot create topology without an explicit topology shape".
        try:
            found = describe(
                platform="cuda",
                topology_name="",
                target_config=(folder / f"{target}.txtpb").read_text(encoding="utf-8"),
                topology=f"1x1x{chips}",
            ).devices
        except NotImplementedError:
            raise NotInstalled(
                f"No compiler for {target}: JAX has not loaded its CUDA plugin, which looks for a "
                "GPU. Start Python with JAX_PLATFORMS=cpu."
            ) from None
    return found[:chips]


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Sets what libtpu reads from the environment when it is loaded."""
    added = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
