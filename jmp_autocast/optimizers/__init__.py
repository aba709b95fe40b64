"""Weights that are stored, and trained, in 16 bits.

weights.py       optax transformations: master weights, Kahan summation, stochastic rounding
wide_params.py   conversion between float32 weights and 16-bit weights with their optimizer state
storing.py       the common part of the three transformations
rounding.py      rounding from float32 to 16 bits, to the nearest value or stochastically
draws.py         keys and random bits, made so that a GPU updates one array after another
"""

from .weights import (
    KahanState,
    MasterWeightsState,
    StochasticRoundingState,
    kahan_summation,
    master_weights,
    stochastic_rounding,
)
from .wide_params import as_float32, float32_params, start_from

__all__ = [
    "KahanState",
    "MasterWeightsState",
    "StochasticRoundingState",
    "as_float32",
    "float32_params",
    "kahan_summation",
    "master_weights",
    "start_from",
    "stochastic_rounding",
]
