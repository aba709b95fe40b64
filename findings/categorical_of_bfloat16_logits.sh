#!/usr/bin/env bash
# jax 0.10.2 and jaxlib 0.10.2, x86-64.
# Expected: even logits of 50,000 tokens draw any of them, in whatever dtype. Seen, the largest token
# of 4,096 draws:
#   float32   above 49,000
#   bfloat16  below 2,000
# The Gumbel noise is drawn in the dtype of the logits: its largest numbers are equal in bfloat16, and
# of equal ones argmax takes the first.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

largest = {}
for dtype in (jnp.float32, jnp.bfloat16):
    logits = jnp.zeros(50_000, dtype)
    draws = jax.random.categorical(jax.random.key(0), logits, shape=(4096,))
    largest[dtype] = int(draws.max())
    print(f"{jnp.dtype(dtype).name:9} {largest[dtype]}")
assert largest[jnp.float32] > 49_000 and largest[jnp.bfloat16] < 2_000, "the behaviour has changed"
PY
