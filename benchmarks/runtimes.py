"""How far off exported programs are in other runtimes: the table of docs/guides/export.md.

    python benchmarks/runtimes.py                   # all; half an hour on two cores
    python benchmarks/runtimes.py IREE OpenVINO
    python benchmarks/runtimes.py --environments DIR --details

Each runtime is installed in an environment of its own (pinned packages, x86-64 Linux, Python 3.12),
in a temporary folder or in DIR, where a later run finds it. Four programs (product, convolution,
softmax of scores, transformer block) add up 1,024 or 8,192 terms in each dtype, without a rule
and with the one that the guide recommends. The error is that of the norm, against float32 in XLA.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

TERMS = (1024, 8192)
DTYPES = ("bfloat16", "float16", "float8")
PRODUCTS = ("dot_general", "conv_general_dilated")
RULE = {"*": "float32"} | dict.fromkeys(PRODUCTS, "FP32_APPEND_DTYPE")
COMPILED = "compiled"


class Runtime(NamedTuple):
    """Where exported programs run.

    Args:
        pins: The packages.
        convert: From a function and its arguments to a function of no argument that runs the
            converted program, or to None if it was compiled and cannot run here.
    """

    pins: tuple[str, ...]
    convert: Callable[[Any, Any], Callable[[], Any] | None]


# --- the programs ---------------------------------------------------------------------------


def programs(terms: int) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Returns programs that add up so many terms, with arguments whose sums grow at each step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    signed = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    weight = lambda *shape: rng.random(shape, np.float32) / terms**0.5
    conv = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

    def norm(x: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)

    def block(x: Any, heads: Any, out: Any, up: Any, down: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhf->bhtf", norm(x), w) for w in heads)
        probs = jax.nn.softmax(jnp.einsum("bhtf,bhsf->bhts", q, k) / 4.0)
        x = x + jnp.einsum("bhts,bhsf,hfd->btd", probs, v, out)
        hidden = norm(x) @ up
        return x + jnp.maximum(hidden, 0.0) @ down

    return {
        "product": (
            lambda x, w: jnp.maximum(x @ w, 0.0),
            [rng.random((8, terms), np.float32), weight(terms, 64)],
        ),
        "convolution": (
            lambda x, w: jnp.maximum(conv(x, w), 0.0),
            [rng.random((1, 8, 8, terms // 16), np.float32), weight(4, 4, terms // 16, 16)],
        ),
        "softmax": (
            lambda q, k: jax.nn.softmax(q @ k.T / terms**0.5),
            [signed(8, terms), signed(64, terms)],
        ),
        "block": (
            block,
            [
                signed(2, 16, 64),
                signed(3, 64, 4, 16) / 8,
                signed(4, 16, 64) / 8,
                signed(64, terms) / 8,
                weight(terms, 64),
            ],
        ),
    }


# --- the runtimes ---------------------------------------------------------------------------


def _stablehlo(fn: Any, args: Any) -> str:
    import jax

    return str(jax.export.export(jax.jit(fn), platforms=["cpu"])(*args).mlir_module())


def _jaxpr(fn: Any, args: Any) -> Any:
    """Returns a jaxpr of JAX's own primitives, whose products have operands of one dtype."""
    import jax

    from jmp_autocast import finalise

    return finalise(jax.make_jaxpr(fn)(*args), platform="cpu")


def _evaluated(jaxpr: Any) -> Callable[..., Any]:
    from jax.extend.core import jaxpr_as_fun

    return lambda *args: jaxpr_as_fun(jaxpr)(*args)[0]


def _jax_on_cpu(fn: Any, args: Any) -> Callable[[], Any]:
    import jax

    exported = jax.export.export(jax.jit(fn), platforms=["cpu"])(*args)
    return lambda: exported.call(*args)


def _jax_for_cuda(fn: Any, args: Any) -> None:
    import jax

    jax.export.export(jax.jit(fn), platforms=["cuda"])(*args)


def _jax_for_tpu(fn: Any, args: Any) -> None:
    import jax
    from jax.experimental import topologies

    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    exported = jax.export.export(jax.jit(fn), platforms=["tpu"])(*args)
    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(chip)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in args]
    jax.jit(exported.call).lower(*shapes).compile()


def _iree(fn: Any, args: Any) -> Callable[[], Any]:
    from iree import compiler, runtime

    program = compiler.compile_str(
        _stablehlo(fn, args),
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    context = runtime.SystemContext(config=runtime.Config("local-task"))
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, program))
    (name,) = {*context.modules.keys()} - {"hal"}
    return lambda: context.modules[name]["main"](*args).to_host()


def _openvino(fn: Any, args: Any) -> Callable[[], Any]:
    import openvino

    model = openvino.convert_model(_jaxpr(fn, args))
    # Else all products run in bfloat16, where the CPU has units for it.
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda: next(iter(compiled(args).values()))


def _onnxruntime(fn: Any, args: Any) -> Callable[[], Any]:
    import jax
    import jax2onnx
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    model = jax2onnx.to_onnx(_evaluated(_jaxpr(fn, args)), shapes)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    named = {i.name: x for i, x in zip(session.get_inputs(), args, strict=True)}
    return lambda: session.run(None, named)[0]


def _tflite(fn: Any, args: Any) -> Callable[[], Any]:
    import tensorflow as tf
    from jax.experimental import jax2tf

    converted = jax2tf.convert(_evaluated(_jaxpr(fn, args)), native_serialization_platforms=["cpu"])
    names = [f"x{i}" for i in range(len(args))]
    spec = [tf.TensorSpec(x.shape, tf.float32, name=n) for x, n in zip(args, names, strict=True)]
    function = tf.function(converted, input_signature=spec, autograph=False)
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function.get_concrete_function()], function
    )
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    model = converter.convert()

    def run() -> Any:
        interpreter = tf.lite.Interpreter(model_content=model)
        interpreter.allocate_tensors()
        places = {
            d["name"].split("_")[-1].split(":")[0]: d for d in interpreter.get_input_details()
        }
        for name, x in zip(names, args, strict=True):
            interpreter.set_tensor(places[name]["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])

    return run


def _core_ml(fn: Any, args: Any) -> None:
    import coremltools
    import stablehlo_coreml
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    module = ir.Module.parse(_stablehlo(fn, args), context=mlir.make_ir_context())
    target = coremltools.target.iOS18
    coremltools.convert(
        stablehlo_coreml.convert(module, minimum_deployment_target=target),
        source="milinternal",
        minimum_deployment_target=target,
        pass_pipeline=stablehlo_coreml.build_pass_pipeline(),
        skip_model_load=True,
    )


_JAX = ("jax==0.12.0.1", "flatbuffers", "optax")
_OLDER_JAX = ("jax==0.10.2", "flatbuffers", "optax", "packaging")
RUNTIMES = {
    "XLA:CPU 0.12.0.1": Runtime(_JAX, _jax_on_cpu),
    "CUDA, lowered": Runtime(_JAX, _jax_for_cuda),
    "TPU v5e, libtpu 0.0.52": Runtime((*_JAX, "libtpu==0.0.52"), _jax_for_tpu),
    "IREE 3.13.0": Runtime(
        (*_JAX, "iree-base-compiler==3.13.0", "iree-base-runtime==3.13.0"), _iree
    ),
    "OpenVINO 2026.4.1": Runtime((*_OLDER_JAX, "openvino==2026.4.1"), _openvino),
    "onnxruntime 1.32.0": Runtime(
        (*_OLDER_JAX, "jax2onnx==0.17.1", "onnxruntime==1.32.0"), _onnxruntime
    ),
    "TFLite 2.21.0": Runtime((*_JAX, "tensorflow==2.21.0"), _tflite),
    "Core ML 9.0": Runtime((*_JAX, "coremltools==9.0", "stablehlo-coreml==0.1.6"), _core_ml),
}


# --- measuring, in the environment of the runtime -------------------------------------------


def measure(runtime: Runtime) -> Iterator[dict[str, Any]]:
    """Yields the outcome of each dtype, rule, program and number of terms: an error or words."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jmp_autocast import Float8, Policy, autocast

    recipe = Float8(minimum=8, multiple=1, skip=(), emulate=True)
    for dtype in DTYPES:
        policy = Policy(jnp.bfloat16, matmul=recipe) if dtype == "float8" else Policy(dtype)
        for with_rule in (False, True):
            chosen = policy.with_rules(RULE) if with_rule else policy
            for terms in TERMS:
                for name, (fn, args) in programs(terms).items():
                    # The rule takes products out of 8 bits; other programs hold no such weight.
                    if dtype == "float8" and (with_rule or name != "product"):
                        continue
                    low = autocast(fn, policy=chosen, params=tuple(range(1, len(args))))
                    exact = np.asarray(jax.jit(fn)(*args))
                    stage = "not converted"
                    try:
                        run = runtime.convert(low, args)
                        stage = "does not run"
                        found = COMPILED if run is None else np.asarray(run(), np.float32) - exact
                        if run is not None:
                            found = 100 * float(np.linalg.norm(found) / np.linalg.norm(exact))
                    # Whatever a converter raises is what the table says.
                    except Exception as error:
                        found = f"{stage}: {type(error).__name__}: {' '.join(str(error).split())}"
                    row = dict(dtype=dtype, rule=with_rule, program=name, terms=terms)
                    yield row | {"found": found[:400] if isinstance(found, str) else found}


# --- the table ------------------------------------------------------------------------------


def rows_of(name: str, folder: pathlib.Path) -> list[dict[str, Any]] | str:
    """Returns what a runtime did with each program, or why it is not installable."""
    environment = folder / name.split()[0].rstrip(",").lower().replace(":", "_")
    python = environment / "bin" / "python"
    if not (environment / "bin" / "pip").exists():
        venv.create(environment, with_pip=True)
    install = [python, "-m", "pip", "install", "-q", *RUNTIMES[name].pins]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"not installable: {done.stderr.strip().splitlines()[-1]}"
    root = str(pathlib.Path(__file__).resolve().parents[1])
    quiet = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": root}
    done = subprocess.run(
        [python, __file__, "--here", name],
        env=os.environ | quiet,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines] or f"ends with status {done.returncode}"


def cell(rows: list[dict[str, Any]], dtype: str) -> str:
    """Returns the worst errors for each number of terms, and which programs fail."""
    rows = [row for row in rows if row["dtype"] == dtype]
    worst = []
    for terms in TERMS:
        errors = [r["found"] for r in rows if r["terms"] == terms and isinstance(r["found"], float)]
        worst += [f"{max(errors):.2g}"] if errors else []
    words = {(r["program"], r["found"].split(":")[0]) for r in rows if isinstance(r["found"], str)}
    failed = [f"{name} {what}" for name, what in sorted(words) if what != COMPILED]
    everywhere = {what for _, what in words} if len(failed) in (0, 4) and not worst else set()
    if len(everywhere) == 1:
        return everywhere.pop()
    return "; ".join([*([f"{', '.join(worst)} %"] if worst else []), *failed])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("runtimes", nargs="*", help="the first words of their names; all of them")
    parser.add_argument("--environments", type=pathlib.Path, help="where environments are kept")
    parser.add_argument("--details", action="store_true", help="each error, and each message")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        for row in measure(RUNTIMES[options.here]):
            print(json.dumps(row), flush=True)
        return
    chosen = [n for n in RUNTIMES if not options.runtimes or n.startswith(tuple(options.runtimes))]
    print(f"| runtime | rule | {' | '.join(DTYPES)} |\n|{'---|' * (len(DTYPES) + 2)}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen:
            rows = rows_of(name, options.environments or pathlib.Path(temporary))
            if isinstance(rows, str):
                print(f"| {name} | {rows} |{' |' * len(DTYPES)}", flush=True)
                continue
            for rule in (False, True):
                some = [row for row in rows if row["rule"] == rule]
                cells = " | ".join(cell(some, dtype) for dtype in DTYPES)
                print(f"| {name} | {'yes' if rule else 'none'} | {cells} |", flush=True)
            for row in rows if options.details else ():
                print(row, file=sys.stderr)


if __name__ == "__main__":
    main()
