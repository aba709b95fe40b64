"""Whether 16 bits are faster on a device: the roofline of `explain`."""

import jax
import jax.numpy as jnp
import pytest

import jmp_autocast.backend
from jmp_autocast import BF16, FP16, autocast, cpu_kernels, explain
from jmp_autocast.backend import Hardware, device_of
from jmp_autocast.inspect.report.products import products_of
from jmp_autocast.inspect.report.roofline import roofline_of

H100 = Hardware("gpu", "NVIDIA H100 80GB HBM3", "9.0")
T4 = Hardware("gpu", "Tesla T4", "7.5")
TPU = Hardware("tpu", "TPU v5 lite")


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def model(w, x):
    return x @ w


LARGE = shape(4096, 4096), shape(8192, 4096)
SMALL = shape(4096, 4096), shape(8, 4096)
# Weights that are stored in 16 bits, and whose copies nobody makes.
STORED = shape(4096, 4096, dtype=jnp.bfloat16), shape(8, 4096, dtype=jnp.bfloat16)
HALF = tuple(shape(*x.shape, dtype=jnp.float16) for x in STORED)


def roofline(arguments, hardware, policy=BF16, fn=model):
    elements = {str(k): x.size for k, x in enumerate(arguments)}
    rows = explain(fn, *arguments, policy=policy).rows
    return roofline_of(products_of(rows, elements), (), hardware)


@pytest.mark.parametrize(
    ("arguments", "hardware", "policy", "speedup", "says"),
    [
        (LARGE, H100, BF16, 2, "limited by arithmetic"),  # against TF32
        (STORED, H100, BF16, 2, "limited by memory"),  # half the bytes
        (SMALL, H100, BF16, 1, "it reads float32 arguments: cast_params stores"),
        (LARGE, T4, FP16, 65 / 8.1, "limited by arithmetic"),
        (HALF, T4, FP16, 2, "limited by memory"),
        (LARGE, T4, BF16, 1, "no units for bfloat16"),
        (LARGE, TPU, BF16, 1, "it multiplies float32 in bfloat16 by default"),
        (STORED, TPU, BF16, 2, "limited by memory"),
    ],
)
def test_what_the_rates_of_a_device_say(arguments, hardware, policy, speedup, says):
    found = roofline(arguments, hardware, policy)
    assert found.speedup == pytest.approx(speedup, rel=0.01)
    assert says in found.says
    assert found.says.startswith("no gain on" if speedup == 1 else "at most")
    assert found.source == device_of(hardware).source


@pytest.mark.parametrize("hardware", [H100, T4, TPU])
def test_a_small_product_gains_nothing(hardware):
    found = roofline((shape(4, 4), shape(4, 4)), hardware, FP16)
    assert found.speedup == 1
    assert found.says.startswith("no gain on")
    assert "too small: a kernel takes" in found.says


def test_a_product_that_stays_in_float32_says_why():
    policy = BF16.with_rules({"dot_general": "FP32"})
    assert roofline(LARGE, H100, policy).says.endswith("it stays in float32: FP32")


def test_an_argument_is_read_once_in_float32():
    """A loop that reads a weight a hundred times reads its copy after the first time."""

    def loop(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=100)[0]

    found = roofline(SMALL, H100, fn=loop)
    assert found.speedup == pytest.approx(2 * 100 / 101, rel=0.02)
    stacked = shape(100, 4096, 4096), SMALL[1]
    layers = lambda ws, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
    assert roofline(stacked, H100, fn=layers).speedup == pytest.approx(1, rel=0.01)


def test_intensity_and_balance():
    found = roofline(STORED, H100)
    flops, nbytes = 2 * 8 * 4096**2, 2 * (4096**2 + 2 * 8 * 4096)
    assert found.intensity == pytest.approx(flops / nbytes)
    assert found.balance == pytest.approx(989.4e12 / 3.35e12)


@pytest.mark.parametrize(
    ("hardware", "says"),
    [
        (("gpu", "A new one", "12.1"), "unknown device A new one: the tensor cores of"),
        (("gpu", "An old one", "6.1"), "unknown device An old one: An old one has no tensor"),
        (("npu", "Another"), "unknown device Another: nothing is known of 16 bits on"),
    ],
)
def test_what_is_not_known_is_said(hardware, says):
    found = roofline(LARGE, Hardware(*hardware))
    assert found.says.startswith(says)
    assert (found.speedup, found.balance, found.source) == (None, None, "")


@pytest.mark.parametrize(
    ("kernels", "policy", "says"),
    [
        (False, BF16, "not faster on this CPU: because"),
        (True, BF16, "faster, at an unknown rate: because"),
        (True, FP16, "not faster on this CPU, which multiplies bfloat16 alone: because"),
    ],
)
def test_a_cpu_is_asked(kernels, policy, says, monkeypatch):
    answer = cpu_kernels.CPUKernels(kernels, kernels, "because")
    monkeypatch.setattr(jmp_autocast.backend, "cpu_kernels", lambda: answer)
    assert roofline(LARGE, Hardware("cpu", "cpu"), policy).says == says
    (time,) = explain(model, *LARGE, policy=policy, device="cpu").devices
    assert (time.says, time.low_seconds, time.dtype) == (says, None, "bfloat16" * kernels)


def test_a_program_without_products():
    found = roofline((shape(8),), H100, fn=jnp.tanh)
    assert found.says == "no matmul or convolution: 16 bits save bytes alone"
    assert explain(jnp.tanh, shape(8), device="h100").devices == ()


def test_a_program_that_holds_autocast_is_compared_with_float32():
    for arguments, speedup in ((LARGE, 2), (SMALL, 1)):
        report = explain(jax.jit(autocast(model, policy=BF16)), *arguments, device="h100")
        assert report.roofline.speedup == pytest.approx(speedup, rel=0.01)


def test_explain_shows_the_line():
    report = explain(model, *SMALL, policy=BF16)
    assert f"\nroofline    {report.roofline.says}" in str(report)
    assert report.to_dict()["roofline"]["device"] == jax.devices()[0].device_kind


def test_there_is_none_of_symbolic_sizes_and_of_float64():
    (rows,) = jax.export.symbolic_shape("rows")
    report = explain(model, shape(64, 64), shape(rows, 64), policy=BF16, device="h100")
    assert (report.roofline, report.devices) == (None, ())
