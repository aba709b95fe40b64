#!/usr/bin/env bash
# jax 0.10.2 and jaxlib 0.10.2, x86-64; the same with 0.12.0.1.
# Expected: the maximum of numbers with a NaN among them is NaN, as NumPy's. Seen on a CPU:
#   1000 numbers: nan
#   100000 numbers: 1.0
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import numpy as np

found = {}
for size in (1_000, 100_000):
    x = np.ones(size, np.float32)
    x[5] = np.nan
    found[size] = float(jnp.max(jnp.asarray(x)))
    print(f"{size} numbers: {found[size]}")
assert np.isnan(found[1_000]) and found[100_000] == 1, "the behaviour has changed"
PY
