"""All programs, by source."""

from . import (
    diffrax_solves,
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
    "diffrax": diffrax_solves,
    "linalg": jax_linalg,
    "jax": jax_functions,
    "control": jax_control,
}
# They take long to compile. `python -m tests.third_party` runs them; the others are like them.
LONG = {
    "linen": "conv lstm, bidirectional lstm, variational autoencoder",
    "haiku": "resnet",
    "equinox": "convolutional network",
    "optax": "ctc with probabilities",
    "diffrax": "backsolve adjoint, implicit euler, stochastic equation, least squares",
    "linalg": "gmres",
    "jax": "special functions, reparameterised samples",
    "control": "lbfgs, kalman filter",
}
PROGRAMS = {
    f"{source}: {name}": program
    for source, module in SOURCES.items()
    for name, program in module.PROGRAMS.items()
}
SLOW = {
    f"{source}: {' '.join(name.split())}"
    for source, names in LONG.items()
    for name in names.split(",")
}
QUICK = [name for name in PROGRAMS if name not in SLOW]
