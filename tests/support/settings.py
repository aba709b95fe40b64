"""What a program may change of its process: JAX's settings, the environment, warnings, NumPy."""

import contextlib
import os
import warnings

import jax
import numpy as np


@contextlib.contextmanager
def as_found():
    """Leaves the process as it was, also where what runs inside fails half-way.

    A page that turned on float64 and then failed took the nineteen tests after it with it.
    """
    settings, environment = dict(jax.config.values), dict(os.environ)
    with warnings.catch_warnings(), np.errstate():
        try:
            yield
        finally:
            changed = {
                name: value
                for name, value in settings.items()
                if jax.config.values[name] is not value and jax.config.values[name] != value
            }
            for name, value in changed.items():
                jax.config.update(name, value)
            if changed:
                # Programs that were traced under the other settings, and constants in them.
                jax.clear_caches()
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
