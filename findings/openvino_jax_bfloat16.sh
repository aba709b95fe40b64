#!/usr/bin/env bash
# openvino 2026.4.1, jax 0.10.2, Python 3.12, x86-64.
# Expected: OpenVINO, which has an element type bf16, converts a jaxpr with a bfloat16 constant as it
# does one with a float16 constant. Seen: "Unsupported data type: bfloat16".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 openvino==2026.4.1 packaging
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import openvino


def above_zero(dtype):
    return lambda x: jnp.maximum(x.astype(dtype), 0).astype(jnp.float32)


x = np.ones((2, 4), np.float32)
openvino.convert_model(jax.make_jaxpr(above_zero(jnp.float16))(x))
try:
    openvino.convert_model(jax.make_jaxpr(above_zero(jnp.bfloat16))(x))
except Exception as error:
    print([line for line in str(error).splitlines() if "bfloat16" in line][0])
    assert "Unsupported data type: bfloat16" in str(error), "the behaviour has changed"
else:
    raise SystemExit("the behaviour has changed")
PY
