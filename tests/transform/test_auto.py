"""The default compute dtype: the backend is asked when a program is traced."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jmp_autocast.call.options
from jmp_autocast import (
    BF16,
    Float8,
    Policy,
    autocast,
    cast_params,
    cpu_kernels,
    explain,
    quantize_params,
    tune,
)
from jmp_autocast.backend import Hardware, preferred_for
from tests.support.jaxprs import dot_dtypes
from tests.support.processes import environment_without_devices

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


@pytest.mark.parametrize(
    ("features", "has_kernel", "reason"),
    [
        ({"avx512_bf16"}, True, "multiplies bfloat16 by avx512_bf16"),
        ({"amx_bf16"}, False, "no kernel for bfloat16"),
        ({"avx2"}, True, "none of amx_bf16, avx512_bf16, bf16"),
    ],
)
def test_a_cpu_is_asked(features, has_kernel, reason, monkeypatch):
    cpu_kernels._kernels_with.cache_clear()
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(cpu_kernels, "_has_kernel", lambda dtype: has_kernel)
    try:
        kernels = cpu_kernels.cpu_kernels()
    finally:
        cpu_kernels._kernels_with.cache_clear()
    fast = has_kernel and "none of" not in reason
    assert kernels.wide == fast
    assert reason in kernels.reason


@pytest.mark.parametrize(
    ("isa", "units"),
    [("", True), ("AMX", True), ("AVX512_BF16", True), ("AVX2", False), ("avx512_vnni", False)],
)
def test_an_older_instruction_set_has_no_units(isa, units, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : avx2 avx512_vnni avx512_bf16\n")
    monkeypatch.setattr(cpu_kernels, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_other=1 --xla_cpu_max_isa={isa}" if isa else "")
    assert cpu_kernels.cpu_features() == {"avx2", "avx512_vnni", *["avx512_bf16"] * units}


# --- the default ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (("tpu", "TPU v5e", ""), "bfloat16", "the matrix units of TPU v5e multiply bfloat16"),
        (("gpu", "H100", "9.0"), "bfloat16", "the tensor cores of H100 multiply bfloat16"),
        (("gpu", "Tesla T4", "7.5"), "float16", "Tesla T4 has tensor cores for float16 alone"),
        (("gpu", "P100", "6.0"), "bfloat16", "the default, although P100 has no tensor cores"),
        (("rocm", "MI50", "gfx906"), "bfloat16", "although MI50 (gfx906) has no matrix units"),
        (("cpu", "cpu", ""), "bfloat16", "the default on a CPU"),
        (("METAL", "M3", ""), "bfloat16", "the default, although nothing is known"),
    ],
)
def test_the_default_is_that_of_the_device(device, dtype, reason, monkeypatch):
    monkeypatch.setattr(jmp_autocast.call.options, "default_device", lambda: Hardware(*device))
    assert preferred_for(Hardware(*device)).dtype == dtype
    jax.devices()
    for options in ({}, {"policy": Policy(level="compute")}):
        fn = autocast(jnp.matmul, **options)
        assert dot_dtypes(jax.make_jaxpr(fn)(X, X)) == [(dtype, dtype, dtype)]
        assert fn.policy.compute_dtype == dtype
        report = explain(fn, X, X)
        assert report.compute_dtype == dtype
        assert reason in report.dtype_reason
        assert f"{dtype}, {report.dtype_reason}" in str(report)
        assert f", {dtype} ({report.dtype_reason}))" in repr(fn)
    assert explain(jnp.matmul, X, X).compute_dtype == dtype
    assert tune(lambda x: x @ x, jnp.eye(8), tolerance=1).policy == Policy(dtype)


def test_who_names_a_dtype_gets_it(monkeypatch):
    monkeypatch.setattr(jmp_autocast.call.options, "default_device", asked)
    half = autocast(jnp.matmul, Policy(jnp.float16, level="compute"))
    assert half.policy == Policy(jnp.float16, level="compute")
    assert dot_dtypes(jax.make_jaxpr(half)(X, X)) == [("float16",) * 3]


class AskedError(Exception):
    pass


def asked():
    raise AskedError


def test_the_device_is_asked_at_the_first_trace(monkeypatch, tmp_path):
    monkeypatch.setattr(jmp_autocast.call.options, "default_device", asked)
    monkeypatch.setattr(sys.modules["jmp_autocast.autocast"], "backends_are_set_up", lambda: False)
    policy = Policy().with_rules({"*": "float32"}, scope="*/ln")
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy
    for fn in (autocast(jnp.matmul), autocast(policy=policy)(jnp.matmul)):
        assert ", default)" in repr(fn)
        assert fn == autocast(jnp.matmul, policy=policy if fn._options.policy == policy else None)
        with pytest.raises(AskedError):
            jax.make_jaxpr(fn)(X, X)


NO_DEVICES = """
import jax, jax.numpy as jnp
from jmp_autocast import Policy, autocast, dynamic_loss_scaling, scaled_value_and_grad, explain
from jmp_autocast.integrations import linen, nnx
import flax.linen
@autocast
def f(x):
    return x @ x
g = autocast(f, policy=Policy(level="compute"))
h = linen.autocast(flax.linen.Dense), nnx.autocast(f), jax.jit(g), jax.grad(f)
print(f, hash(g), h)
x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
try:
    jax.eval_shape(f, x)
except RuntimeError as error:
    print("asked:", error)
"""


@pytest.mark.process
def test_a_process_without_devices_imports_and_wraps():
    environment = environment_without_devices() | {"JAX_PLATFORMS": "none_such"}
    done = subprocess.run(
        [sys.executable, "-c", NO_DEVICES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ", default)" in done.stdout
    assert "asked: Unable to initialize backend 'none_such'" in done.stdout


# --- the switch -------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["0", "off", "OFF", "false"])
def test_the_environment_turns_it_off(word, monkeypatch):
    plain = lambda w, x: jnp.tanh(x @ w)
    low = autocast(plain, policy=BF16, output_dtype="computed")
    expected = str(jax.make_jaxpr(autocast(plain, enabled=False))(X, X))
    w, x = jnp.eye(8), jnp.ones((8, 8))
    monkeypatch.setenv("JMP_AUTOCAST", word)
    assert str(jax.make_jaxpr(low)(X, X)) == expected
    assert dot_dtypes(jax.make_jaxpr(low)(X, X)) == [("float32",) * 3]
    assert cast_params(low, w, x) is w
    eight = Policy(jnp.bfloat16, matmul=Float8(minimum=1, multiple=1, skip=(), emulate=True))
    assert quantize_params(plain, w, x, policy=eight) is w
    assert explain(low, X, X).rows[0].results == ("bfloat16",)  # the plan is still there
    with pytest.raises(ValueError, match=r"tune runs .* JMP_AUTOCAST turns it off\. Unset it"):
        tune(plain, batches=[(w, x)], tolerance=0.1)


@pytest.mark.parametrize("word", ["", "1", "on", "true", "True"])
def test_the_environment_leaves_it_on(word, monkeypatch):
    monkeypatch.setenv("JMP_AUTOCAST", word)
    low = autocast(jnp.matmul, policy=BF16)
    assert dot_dtypes(jax.make_jaxpr(low)(X, X)) == [("bfloat16",) * 3]


def test_another_word_in_the_environment(monkeypatch):
    monkeypatch.setenv("JMP_AUTOCAST", "float32")
    rule = (
        r"JMP_AUTOCAST must be 0 or off.* 1 or on, got 'float32'. Set it to one of them, or unset"
    )
    with pytest.raises(ValueError, match=rule):
        autocast(jnp.matmul)(X, X)
