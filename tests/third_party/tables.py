"""All programs, by source."""

from . import (
    equinox_layers,
    flax_linen,
    flax_nnx,
    haiku_nets,
    jax_control,
    jax_functions,
    jax_linalg,
    optax_losses,
)

SOURCES = {
    "linen": flax_linen,
    "nnx": flax_nnx,
    "haiku": haiku_nets,
    "equinox": equinox_layers,
    "optax": optax_losses,
    "linalg": jax_linalg,
    "jax": jax_functions,
    "control": jax_control,
}
PROGRAMS = {
    f"{source}: {name}": program
    for source, module in SOURCES.items()
    for name, program in module.PROGRAMS.items()
}
