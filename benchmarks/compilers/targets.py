"""Compilers for devices that are not there: which they are, and how they are asked.

`libtpu` holds the TPU's, the CUDA plugin of JAX the GPU's. A GPU's is told about the chip by a text
that XLA calls a target configuration.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

TPUS: Mapping[str, Mapping[int, str]] = {
    "v5e": {1: "2x2", 4: "2x2", 16: "4x4", 256: "16x16"},
    "v6e": {1: "2x2", 4: "2x2", 16: "4x4", 256: "16x16"},
    "v5p": {1: "2x2x1", 4: "2x2x1", 16: "2x2x4", 256: "4x8x8"},
    "tpu7x": {1: "2x2x1", 4: "2x2x1", 16: "2x2x4", 256: "4x8x8"},
}
"""The smallest topology with so many chips; `v5e` has no smaller one than 2x2 with all links."""

GPUS = ("h100", "b200", "a100")

# libtpu asks Google's metadata server what machine it is on, and locks the chips.
_SETTINGS = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class NotInstalled(Exception):
    """The compiler of a target is not installed or not loaded; the message says what to do."""


def prepare_environment() -> None:
    """Sets what the compilers read from the environment; before JAX starts a backend."""
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
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


@functools.lru_cache(maxsize=16)
def devices(target: str, chips: int = 1) -> Sequence[Any]:
    """Returns the devices of a target, as the compiler describes them."""
    check_installed(target)
    if target in TPUS:
        with _settings():
            name = f"{target}:{TPUS[target][chips]}"
            found = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    else:
        config = pathlib.Path(__file__).parent / "gpu_targets" / f"{target}.txtpb"
        try:
            found = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                target_config=config.read_text(encoding="utf-8"),
                topology=f"1x1x{chips}",  # else: "without an explicit topology shape"
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
