#!/usr/bin/env bash
# jax2onnx 0.17.1, onnxruntime 1.32.0, jax 0.10.2 (jax2onnx fails at JAX 0.12), Python 3.12, x86-64.
# Expected: a dot_general of float16 operands with a float32 result is a model that loads, as jnp.dot
# is, or an error of the converter. Seen: a Gemm of two dtypes, which onnxruntime refuses:
#   Type parameter (T) of Optype (Gemm) bound to different types
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.12}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2 jax2onnx==0.17.1 onnxruntime==1.32.0
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import jax2onnx
import onnxruntime

onnxruntime.set_default_logger_severity(4)


def product(x, y):
    contracted = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, y, contracted, preferred_element_type=jnp.float32)


shapes = [jax.ShapeDtypeStruct((8, 64), jnp.float16), jax.ShapeDtypeStruct((64, 16), jnp.float16)]
model = jax2onnx.to_onnx(product, shapes).SerializeToString()
try:
    onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
except Exception as error:
    print(error)
    assert "(Gemm) bound to different types" in str(error), "the behaviour has changed"
else:
    raise SystemExit("the behaviour has changed")
PY
