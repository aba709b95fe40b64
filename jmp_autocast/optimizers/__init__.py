"""Weights that are stored, and trained, in 16 bits.

weights.py       optax transformations: master weights, Kahan summation, stochastic rounding
wide_params.py   float32 weights out of 16-bit ones and their optimizer state, and back into it
storing.py       the common part of the three transformations of weights
rounding.py      float32 to 16 bits: to the nearest, and stochastically
draws.py         keys and random bits, such that a GPU updates one array after another
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
