#!/usr/bin/env bash
# Measures on one GPU what compilers alone cannot say: step times and peak memory.
#
#     benchmarks/on_gpu.sh              # within 12 minutes; results in $OUT, or benchmarks/gpu_results
#     benchmarks/on_gpu.sh --try        # tiny sizes, on whatever JAX finds: does the script work?
#     PARTS="GPT" benchmarks/on_gpu.sh  # some alone: training, GPT, ResNet, LSTM, loss_scale
#
# It needs a Python with JAX for the GPU, Flax and optax, and takes PyTorch and jmp where they are.
# It fetches nothing and installs nothing. Parts run in the order of their worth. Each has a limit,
# and none starts that could not end in time, so that a caller with 12 minutes gets every result.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=${OUT:-benchmarks/gpu_results}
budget=${BUDGET:-700} # seconds for all parts
size=--large
parameters=1e8
[ "${1:-}" = --try ] && { size=--tiny parameters=1e5; }

mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
# Compiled programs are kept: the peak of each variant is measured in a process of its own.
export JAX_COMPILATION_CACHE_DIR=$out/.cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=1
started=$SECONDS
failed=0

# part NAME LIMIT COMMAND...: runs a command for LIMIT seconds at most, and keeps what it prints.
part() {
    local name=$1 limit=$2 left status
    shift 2
    left=$((budget - (SECONDS - started)))
    if [ "$left" -lt 20 ]; then
        printf '\n=== %s: not run, %s s are left\n' "$name" "$left" | tee "$out/$name.txt"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    printf '\n=== %s (at %s s, %s s at most)\n' "$name" "$((SECONDS - started))" "$limit"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    status=${PIPESTATUS[0]}
    if [ "$status" -ne 0 ]; then
        failed=1
        printf '=== %s ended with status %s\n' "$name" "$status" | tee -a "$out/$name.txt"
    fi
}

{
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
    "$python" - <<'PYTHON'
import importlib.metadata as metadata
import platform

import jax

print("Python", platform.python_version())
for name in ("jax", "jaxlib", "flax", "optax", "jmp", "torch"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")
print("backend", jax.default_backend(), jax.devices())
PYTHON
} 2>&1 | tee "$out/machine.txt"
if [ "$size" = --large ] && ! grep -q '^backend gpu' "$out/machine.txt"; then
    echo "JAX finds no GPU here; benchmarks/on_gpu.sh --try runs without one." >&2
    exit 3
fi

compare() {
    local model=$1 limit=$2
    shift 2
    part "vs_handwritten_$model" "$limit" "$python" benchmarks/vs_handwritten.py "$size" \
        --models "$model" --seeds 1 --steps 20 --variants "$@"
}

for name in ${PARTS:-training GPT ResNet LSTM loss_scale}; do
    case $name in
        # 1,000 steps of four variants, 3 minutes on an H100, and as much for compiling at most.
        training) part training 330 "$python" benchmarks/train_gpt.py "$size" \
            --output "$out/training.json" ;;
        # The GPT comes with PyTorch's autocast, eager and compiled, on the same model.
        GPT) compare GPT 330 float32 hand-written "ours o1" "ours compute" ;;
        ResNet) compare ResNet 150 float32 hand-written "ours o1" ;;
        LSTM) compare LSTM 120 float32 hand-written "ours o1" "ours compute" ;;
        # Rounds of a few milliseconds each; compiling five variants takes most of the time.
        loss_scale) part loss_scale 90 "$python" benchmarks/loss_scale.py \
            --parameters "$parameters" --rounds 60 ;;
        *) echo "no such part: $name" >&2; exit 2 ;;
    esac
done

rm -rf "$out/.cache"
printf '\n=== done after %s s; results in %s\n' "$((SECONDS - started))" "$out"
exit "$failed"
