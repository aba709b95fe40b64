#!/usr/bin/env bash
# iree-base-compiler 3.13.0 and iree-base-runtime 3.13.0, x86-64, llvm-cpu.
# Expected: the bfloat16 product of a row of 8,192 ones and a column of them is 8192, which bfloat16
# holds. Seen: sums are kept in the dtype of the result, and 256 + 1 is 256 in bfloat16.
#   bf16 result 2048
#   f32 result, rounded afterwards 8192
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q iree-base-compiler==3.13.0 iree-base-runtime==3.13.0
"$folder/venv/bin/python" - <<'PY'
import iree.compiler
import iree.runtime
import numpy as np

PROGRAM = """
func.func @main(%x: tensor<8x8192xf32>, %y: tensor<8192x16xf32>) -> tensor<8x16xf32> {
  %a = stablehlo.convert %x : (tensor<8x8192xf32>) -> tensor<8x8192xbf16>
  %b = stablehlo.convert %y : (tensor<8192x16xf32>) -> tensor<8192x16xbf16>
  %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
    : (tensor<8x8192xbf16>, tensor<8192x16xbf16>) -> tensor<8x16xOUT>
  %d = stablehlo.convert %c : (tensor<8x16xOUT>) -> tensor<8x16xbf16>
  %e = stablehlo.convert %d : (tensor<8x16xbf16>) -> tensor<8x16xf32>
  return %e : tensor<8x16xf32>
}
"""


def product(out):
    program = iree.compiler.compile_str(
        PROGRAM.replace("OUT", out),
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=["--iree-llvmcpu-target-cpu=generic"],
    )
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-task"))
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, program))
    (name,) = [name for name in context.modules.keys() if name != "hal"]
    ones = np.ones((8, 8192), np.float32), np.ones((8192, 16), np.float32)
    return float(context.modules[name]["main"](*ones).to_host()[0, 0])


rounded, accumulated = product("bf16"), product("f32")
print(f"bf16 result {rounded:.0f}\nf32 result, rounded afterwards {accumulated:.0f}")
assert (rounded, accumulated) == (2048, 8192), "the behaviour has changed"
PY
