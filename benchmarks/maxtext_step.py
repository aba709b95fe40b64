"""MaxText's own training step, by hand and by policy, as the TPU compiler makes it without a TPU.

    python benchmarks/maxtext_step.py llama                 # widths of 7B, 2 layers, FSDP 4
    python benchmarks/maxtext_step.py llama --chips 16 --layers 4 --remat minimal_with_context
    python benchmarks/maxtext_step.py mixtral               # megablox
    python benchmarks/maxtext_step.py llama mixtral --check # small; fails if they differ

``nox -s maxtext`` installs what it needs. By hand is ``dtype=bfloat16``, float32 is
``dtype=float32`` with the loss wrapped; the weights are float32 in both.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
from typing import Any

# Read when they are imported; several may compile at once, as no chip is held.
os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "TPU_SKIP_MDS_QUERY": "1"}
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from compilers import report
from compilers.measure import Row, read
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.kernels import megablox
from maxtext.layers.attention_op import splash_attention_kernel as splash
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils, sharding

from jmp_autocast import BF16, Policy, in_compute_dtype
from jmp_autocast.integrations.nnx import autocast

COMMON = {
    "run_name": "step",
    "base_output_directory": "unused",
    "enable_checkpointing": False,
    "log_config": False,
    "dataset_type": "synthetic",
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "skip_jax_distributed_system": True,
    "hardware": "tpu",
    "compile_topology_num_slices": 1,
    "per_device_batch_size": 1,
    "attention": "flash",
    "scan_layers": True,
    "steps": 100,
    "weight_dtype": "float32",
}
_EXPERTS = {"model_name": "mixtral-8x7b", "override_model_config": True, "megablox": True}
_EXPERTS |= {"num_experts": 8, "num_experts_per_tok": 2, "sparse_matmul": True}
MODELS = {"llama": {}, "mixtral": _EXPERTS}
SIZES = {"llama": (4096, 32, 32, 11008, 2048), "mixtral": (2048, 16, 4, 4096, 2048)}
SMALL = (512, 4, 4, 1024, 1024)
"""Width, heads, heads of keys, inner width and length."""
VARIANTS = {"by hand": None, "by policy": Policy("bfloat16", level="by_hand"), "default": BF16}


def put_kernels_into_16_bits() -> None:
    """Has the kernels that MaxText calls run with 16-bit operands and results under autocast."""
    gmm = megablox.gmm

    def product(lhs: Any, *args: Any, **options: Any) -> Any:
        return gmm(lhs, *args, **(options | {"preferred_element_type": lhs.dtype}))

    megablox.gmm = in_compute_dtype(product)
    splash._splash_attention = in_compute_dtype(splash._splash_attention)


def config(model: str, chips: int, layers: int, remat: str, dtype: str, small: bool) -> Any:
    """Returns MaxText's configuration."""
    width, heads, kv_heads, inner, length = SMALL if small else SIZES[model]
    sizes = {
        "base_emb_dim": width,
        "base_num_query_heads": heads,
        "base_num_kv_heads": kv_heads,
        "head_dim": 128,
        "base_mlp_dim": inner,
        "base_moe_mlp_dim": inner,
        "vocab_size": 4096 if small else 32000,
        "max_target_length": length,
        "base_num_decoder_layers": layers,
        "remat_policy": remat,
        "compile_topology": f"v5e-{chips}",
        "dtype": dtype,
    }
    return pyconfig.initialize(None, **COMMON, **MODELS[model], **sizes)


def lowered(cfg: Any, policy: Any) -> Any:
    """Returns MaxText's training step, lowered for the chips of its configuration."""
    mesh = train_compile.get_topology_mesh(cfg)
    args, kwargs, states, _, graph = train_compile.get_shaped_inputs(mesh, cfg)
    of_params, states = sharding.maybe_update_params_sharding_with_opt(cfg, states)
    given = sharding.build_zero1_input_state_mesh_shardings(cfg, states, of_params)
    of_data = sharding.get_input_data_sharding(cfg, mesh)
    plain = train.loss_fn
    # This line, and `put_kernels_into_16_bits`, are all that a user writes.
    train.loss_fn = autocast(train.loss_fn, policy=policy) if policy else plain
    try:
        step, ins, outs, static, donated = maxtext_utils.get_functional_train_with_signature(
            train.train_step, of_data, given, graph, cfg, of_params
        )
        with jax.set_mesh(mesh), logical_axis_rules(cfg.logical_axis_rules):
            jitted = jax.jit(
                step,
                in_shardings=ins,
                out_shardings=outs,
                static_argnums=static,
                donate_argnums=donated,
            )
            return jitted.lower(*args, **kwargs)
    finally:
        train.loss_fn = plain


def kernels(text: str) -> collections.Counter[str]:
    """Returns the types of operands and results of each Pallas kernel of a lowered program."""
    calls = re.findall(r"tpu_custom_call\(.*?\) .*?: (\(.*?\) -> .*)", text)
    return collections.Counter(re.sub(r"\b\d+x|tensor|[<> ]", "", call) for call in calls)


def compiled(program: Any) -> Row:
    """Returns what the compiler made of a lowered step."""
    jax.config.update("jax_optimization_level", "O0")
    made = program.compile()
    memory = made.memory_analysis()
    # JAX's splash kernel writes its metadata in lines of their own.
    text = re.sub(r"\n(?=\"xprof_metadata\"|\}\}, )", " ", made.as_text())
    temporary, arguments = memory.temp_size_in_bytes, memory.argument_size_in_bytes
    return dataclasses.replace(read(text), temporary=temporary, arguments=arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=tuple(MODELS))
    parser.add_argument("--chips", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--remat", default="full")
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS)[:2]
    )
    parser.add_argument("--check", action="store_true", help="small sizes; fails if they differ")
    chosen = parser.parse_args()
    put_kernels_into_16_bits()
    for model in chosen.models:
        rows, calls = {}, {}
        for name in chosen.variants:
            jax.clear_caches()
            dtype = "float32" if VARIANTS[name] else "bfloat16"
            cfg = config(model, chosen.chips, chosen.layers, chosen.remat, dtype, chosen.check)
            program = lowered(cfg, VARIANTS[name])
            calls[name] = kernels(program.as_text())
            rows[name] = row = compiled(program)
            print(f"{model}, {name}: {report.line(row)}", flush=True)
            first = rows[chosen.variants[0]]
            ratios = {
                k: getattr(row, k) / getattr(first, k) for k in ("wire", "traffic", "temporary")
            }
            print("  ratios:", ", ".join(f"{k} {v:.3f}" for k, v in ratios.items()), flush=True)
        if chosen.check:
            assert calls["by hand"] == calls["by policy"], calls
            assert ratios["wire"] < 1.05, ratios


if __name__ == "__main__":
    main()
