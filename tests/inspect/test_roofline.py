"""Whether 16 bits are faster on a device: the roofline of `explain`."""

import jax
import jax.numpy as jnp
import pytest

import jmp_autocast.backend
from jmp_autocast import BF16, FP16, autocast, cpu_kernels, explain
from jmp_autocast.backend import Device, rates_of
from jmp_autocast.inspect.report.roofline import roofline_of
from jmp_autocast.policies import FLOAT32

H100 = Device("gpu", "NVIDIA H100 80GB HBM3", "9.0")
T4 = Device("gpu", "Tesla T4", "7.5")
TPU = Device("tpu", "TPU v5 lite")


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def model(w, x):
    return x @ w


LARGE = shape(4096, 4096), shape(8192, 4096)
SMALL = shape(4096, 4096), shape(8, 4096)


def roofline(arguments, device, policy=BF16):
    return roofline_of(explain(model, *arguments, policy=policy).rows, device, FLOAT32)


@pytest.mark.parametrize(
    ("arguments", "device", "policy", "speedup", "limit"),
    [
        (LARGE, H100, BF16, 2, "arithmetic"),  # against TF32
        (SMALL, H100, BF16, 2, "memory"),  # half the bytes
        (LARGE, T4, FP16, 65 / 8.1, "arithmetic"),
        (LARGE, T4, BF16, 1, "arithmetic"),  # no units for bfloat16
        (LARGE, TPU, BF16, 1, "arithmetic"),  # which multiplies float32 in bfloat16 by default
        (SMALL, TPU, BF16, 2, "memory"),
    ],
)
def test_what_the_rates_of_a_device_say(arguments, device, policy, speedup, limit):
    found = roofline(arguments, device, policy)
    assert found.speedup == pytest.approx(speedup)
    assert f"limited by {limit}" in found.says
    assert found.source == rates_of(device).source


def test_intensity_and_balance():
    found = roofline(SMALL, H100)
    flops, nbytes = 2 * 8 * 4096**2, 2 * (4096**2 + 2 * 8 * 4096)
    assert found.intensity == pytest.approx(flops / nbytes)
    assert found.balance == pytest.approx(989.4e12 / 3.35e12)


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (Device("gpu", "A new one", "12.1"), "unknown device A new one: the tensor cores of"),
        (Device("gpu", "An old one", "6.1"), "unknown device An old one: An old one has no tensor"),
        (Device("npu", "Another"), "unknown device Another: nothing is known of 16 bits on"),
    ],
)
def test_what_is_not_known_is_said(device, says):
    found = roofline(LARGE, device)
    assert found.says.startswith(says)
    assert (found.speedup, found.balance, found.source) == (None, None, "")


@pytest.mark.parametrize(
    ("kernels", "policy", "says"),
    [
        (False, BF16, "not faster on this CPU: because"),
        (True, BF16, "faster on this CPU, at an unknown rate: because"),
        (True, FP16, "not faster on this CPU, which multiplies bfloat16 alone: because"),
    ],
)
def test_a_cpu_is_asked(kernels, policy, says, monkeypatch):
    answer = cpu_kernels.CPUKernels(kernels, kernels, "because")
    monkeypatch.setattr(jmp_autocast.backend, "cpu_kernels", lambda: answer)
    assert roofline(LARGE, Device("cpu", "cpu"), policy).says == says


def test_a_program_without_products():
    found = roofline_of(explain(jnp.tanh, shape(8), policy=BF16).rows, H100, FLOAT32)
    assert found.says == "no matmul or convolution: 16 bits save bytes alone"


def test_a_program_that_holds_autocast_is_compared_with_float32():
    report = explain(jax.jit(autocast(model, policy=BF16)), *LARGE)
    assert roofline_of(report.rows, H100, FLOAT32).speedup == pytest.approx(2)


def test_explain_shows_the_line():
    report = explain(model, *SMALL, policy=BF16)
    assert f"\nroofline    {report.roofline.says}" in str(report)
    assert report.to_dict()["roofline"]["device"] == jax.devices()[0].device_kind


def test_there_is_none_of_symbolic_sizes():
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    assert explain(model, shape(64, 64), x, policy=BF16).roofline is None
