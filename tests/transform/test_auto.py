"""`compute_dtype="auto"`: the default backend chooses when a program is traced."""

import jax
import jax.numpy as jnp
import pytest

import jmp_autocast.call.options
from jmp_autocast import BF16, FP16, autocast, compute_precision, cpu_kernels, explain
from jmp_autocast.backend import Device, choose_for, default_device
from tests.support.jaxprs import dot_dtypes

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (("tpu", "TPU v5e", ""), "bfloat16", "matrix units of TPU v5e"),
        (("gpu", "H100", "9.0"), "bfloat16", "tensor cores of H100"),
        (("cuda", "A100", "8.0"), "bfloat16", "tensor cores"),
        (("gpu", "B200", "10.0"), "bfloat16", "tensor cores"),
        (("gpu", "Tesla T4", "7.5"), "float16", "for float16 alone"),
        (("gpu", "P100", "6.0"), None, "no tensor cores"),
        (("rocm", "MI250", "gfx90a"), "bfloat16", "matrix units"),
        (("rocm", "MI50", "gfx906"), None, "no matrix units"),
        (("cpu", "cpu", ""), None, "none of amx_bf16"),
        (("METAL", "M3", ""), None, "nothing is known"),
    ],
)
def test_the_hardware_decides(device, dtype, reason, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset())
    choice = choose_for(Device(*device))
    assert choice.dtype == (None if dtype is None else jnp.dtype(dtype))
    assert reason in choice.reason
    monkeypatch.setattr(jmp_autocast.call.options, "default_device", lambda: Device(*device))
    # Asked when it is traced, whatever dtype the policy names.
    fn = autocast(jnp.matmul, compute_dtype="auto", policy=FP16)
    report = explain(fn, X, X)
    assert report.rows[0].operands[0] == report.compute_dtype == (dtype or "float32")
    assert f"{dtype or 'float32'}, {choice.reason}" in str(report)
    assert set(dot_dtypes(jax.make_jaxpr(fn)(X, X))) == {(dtype or "float32",) * 3}


@pytest.mark.parametrize(
    ("features", "has_kernel", "reason"),
    [
        ({"avx512_bf16"}, True, "multiplies bfloat16 by avx512_bf16"),
        ({"avx2", "amx_bf16", "avx512_bf16"}, True, "by amx_bf16"),
        ({"asimd", "bf16"}, True, "by bf16"),
        ({"amx_bf16"}, False, "no kernel for bfloat16"),
        ({"avx2"}, True, "none of amx_bf16, avx512_bf16, bf16"),
    ],
)
def test_a_cpu_is_asked(features, has_kernel, reason, monkeypatch):
    cpu_kernels._kernels_with.cache_clear()
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(cpu_kernels, "_has_kernel", lambda dtype: has_kernel)
    try:
        choice = choose_for(Device("cpu", "cpu"))
    finally:
        cpu_kernels._kernels_with.cache_clear()
    fast = has_kernel and "none of" not in reason
    assert choice.dtype == (jnp.bfloat16 if fast else None)
    assert reason in choice.reason


def test_without_fast_kernels_nothing_is_lowered_but_what_a_scope_names(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset())
    assert choose_for(default_device()).dtype is None

    def fn(x):
        with compute_precision(jnp.bfloat16):
            x = x @ x
        return jnp.tanh(x @ x)

    low = autocast(fn, compute_dtype="auto")
    assert dot_dtypes(jax.make_jaxpr(low)(X)) == [("bfloat16",) * 3, ("float32",) * 3]
    plain = lambda x: jnp.tanh(x @ x)
    rewritten = jax.make_jaxpr(autocast(plain, compute_dtype="auto"))(X)
    assert str(rewritten) == str(jax.make_jaxpr(plain)(X))
    assert autocast(fn, compute_dtype="auto") is low
    assert autocast(fn, policy=BF16) != autocast(fn, compute_dtype="auto", policy=BF16)
    assert "compute_dtype=auto" in repr(low)
