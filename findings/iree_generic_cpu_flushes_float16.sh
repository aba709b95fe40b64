#!/usr/bin/env bash
# iree-base-compiler 3.13.0 and iree-base-runtime 3.13.0, x86-64, llvm-cpu.
# Expected: float16 holds numbers down to 6e-8, so that 3e-5 stays 3.00e-05. Seen:
#   target cpu host     3.00e-05
#   target cpu generic  0.00e+00
# Where the target has no instruction for it, the conversion makes 0 of subnormal numbers (below 6.1e-5).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q iree-base-compiler==3.13.0 iree-base-runtime==3.13.0
"$folder/venv/bin/python" - <<'PY'
import iree.compiler
import iree.runtime
import numpy as np

PROGRAM = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %a = stablehlo.convert %x : (tensor<4xf32>) -> tensor<4xf16>
  %b = stablehlo.convert %a : (tensor<4xf16>) -> tensor<4xf32>
  return %b : tensor<4xf32>
}
"""
found = {}
for cpu in ("host", "generic"):
    program = iree.compiler.compile_str(
        PROGRAM,
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=[f"--iree-llvmcpu-target-cpu={cpu}"],
    )
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-task"))
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, program))
    (name,) = [name for name in context.modules.keys() if name != "hal"]
    found[cpu] = float(context.modules[name]["main"](np.full(4, 3e-5, np.float32)).to_host()[0])
    print(f"target cpu {cpu:8} {found[cpu]:.2e}")
assert found["host"] > 2.9e-5 and found["generic"] == 0, "the behaviour has changed"
PY
