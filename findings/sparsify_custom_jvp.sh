#!/usr/bin/env bash
# jax 0.10.2 and jaxlib 0.10.2, x86-64; the same with 0.12.0.1.
# Expected: `jax.experimental.sparse.sparsify` evaluates `jax.nn.relu` of a dense value, as it does
# `jnp.maximum(x, 0)`. Seen: KeyError: 'subfuns'. `relu` is a function with a derivative rule, and the
# interpreter binds its equation of dense operands with the parameters of the jaxpr.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental import sparse

matrix, x = sparse.BCOO.fromdense(jnp.eye(4)), jnp.ones((4, 4))
print(sparse.sparsify(lambda m, x: jnp.maximum(m @ x, 0))(matrix, x).shape)
try:
    sparse.sparsify(lambda m, x: jax.nn.relu(m @ x))(matrix, x)
except KeyError as error:
    print(f"KeyError: {error}")
else:
    raise SystemExit("the behaviour has changed")
PY
