"""Values of test programs: random trees, and how far an array is from its reference."""

import numpy as np


def normal(seed, **shapes):
    """A dict of float32 arrays of the standard normal distribution."""
    random = np.random.default_rng(seed)
    return {n: random.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def relative_error(found, expected):
    """The norm of the difference, as a part of the reference's norm."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
