"""The options under which a device's compiler multiplies 16 bits where it does not by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .backend import default_device
from .cpu_kernels import ONEDNN, cpu_kernels, onednn_convolves
from .policies.errors import wrong_type


def compiler_options() -> dict[str, Any]:
    """Returns the options under which the default device's compiler convolves in 16 bits.

    They are for ``jax.jit``, and for `autocast`, which cannot see what ``jax.jit`` is told. On a
    CPU that multiplies bfloat16 it is XLA's experimental oneDNN option, from JAX 0.12 on; elsewhere
    there are none. The first call compiles a convolution of 16 x 16 pixels (0.1 s).

    With it, convolutions whose results are bfloat16 run about 3 times as fast as float32, and
    matmuls that hand out float32, as the gradients of dense weights do by default, as slow as
    float32: it is for convolutional networks, for inference, and for a policy with
    ``level="by_hand"``.

    Returns:
        Names and values, as ``jax.jit(compiler_options=)`` takes them; empty where none help.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, autocast, compiler_options
        >>> def forward(kernel, images):
        ...     return jax.lax.conv(images, kernel, (1, 1), "SAME")
        >>> options = compiler_options()
        >>> fast = autocast(forward, policy=BF16, compiler_options=options)
        >>> kernel, images = jnp.ones((8, 3, 3, 3)), jnp.ones((2, 3, 16, 16))
        >>> jax.jit(fast, compiler_options=options)(kernel, images).shape
        (2, 8, 16, 16)
    """
    if default_device().platform == "cpu" and cpu_kernels().rounded and onednn_convolves():
        return {ONEDNN: True}
    return {}


def asks_for_onednn(options: Any) -> bool:
    """Returns whether a program is compiled with oneDNN's convolutions.

    Args:
        options: What the user gives `autocast` as ``compiler_options``.

    Raises:
        TypeError: It is no mapping of names.
    """
    if options is None:
        return False
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise wrong_type(
            "compiler_options takes what jax.jit takes, a dict from names to values",
            options,
            "Write options = jmp_autocast.compiler_options(), and give it to both.",
        )
    value = options.get(ONEDNN, False)
    return value is True or str(value).lower() in ("true", "1")
