#!/usr/bin/env bash
# jax 0.12.0.1 and jaxlib 0.12.0.1 (needs Python 3.12 or later), x86-64.
# Expected: a bfloat16 product of 4,096 terms has one rounding error, 0.17 % of its norm, whatever
# becomes of its result. Seen, on a CPU without bfloat16 instructions (imitated by an XLA flag):
#   x @ y      0.0017
#   (x @ y).T  0.0202
# The transposed product is a loop of XLA's own, which adds up in bfloat16. float16 has 0.0002 in both.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 jaxlib==0.12.0.1
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_max_isa=AVX2 "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

random = np.random.default_rng(0)
x = jnp.asarray(random.standard_normal((64, 4096)), jnp.bfloat16)
y = jnp.asarray(random.standard_normal((4096, 32)), jnp.bfloat16)
exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)


def error(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


plain = error(jax.jit(lambda x, y: x @ y)(x, y), exact)
transposed = error(jax.jit(lambda x, y: (x @ y).T)(x, y), exact.T)
print(f"x @ y      {plain:.4f}\n(x @ y).T  {transposed:.4f}")
assert plain < 0.003 < 0.01 < transposed, "the behaviour has changed"
PY
