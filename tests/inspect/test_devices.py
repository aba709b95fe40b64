"""`explain(device=...)`: names, rates, what chooses the dtype, the wire, and one trace for all."""

import json
import re
import tomllib
import warnings
from importlib import resources
from time import process_time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import BF16, Policy, autocast, explain, keep_less
from jmp_autocast.backend import choose_for, default_device, hardware_of, preferred_for, supposing
from jmp_autocast.devices import as_device, device_of_kind, generation_of, known_devices
from jmp_autocast.inspect import Device
from jmp_autocast.inspect.report.kept import kept_bytes
from jmp_autocast.inspect.report.wire import wire_of
from tests.support.jaxprs import dot_dtypes

KNOWN = {device.name: device for device in known_devices()}


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def model(params, x):
    for k, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{k}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return x[:4] @ params["head"]


SHAPES = {"layers": [shape(4096, 4096)] * 3, "head": shape(4096, 8)}, shape(4096, 4096)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "name"),
    {
        "h100": "H100 SXM",
        "H100 SXM": "H100 SXM",
        "nvidia-h100-80gb-hbm3": "H100 SXM",
        "H100 PCIe": "H100 PCIe",
        "NVIDIA H100 NVL": "H100 NVL",
        "NVIDIA H200": "H200 SXM",
        "NVIDIA GH200 480GB": "GH200",
        "b200": "B200",
        "NVIDIA GB200": "GB200",
        "a100": "A100 SXM 80GB",
        "a100-40gb": "A100 40GB",
        "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
        "NVIDIA A100-SXM4-40GB": "A100 40GB",
        "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
        "NVIDIA A100-PCIE-40GB": "A100 40GB",
        "L4": "L4",
        "NVIDIA L40S": "L40S",
        "Tesla T4": "T4",
        "Tesla V100-SXM2-16GB": "V100 SXM2",
        "rtx 4090": "RTX 4090",
        "NVIDIA GeForce RTX 3090": "RTX 3090",
        "mi300x": "MI300X",
        "AMD Instinct MI250X": "MI250X (one die)",
        "v5e": "TPU v5e",
        "TPU v5 lite": "TPU v5e",
        "TPU v5": "TPU v5p",
        "tpu-v5p": "TPU v5p",
        "TPU v6 lite": "TPU v6e",
        "Trillium": "TPU v6e",
        "ironwood": "TPU7x (half a chip)",
        "TPU7x": "TPU7x (half a chip)",
        "TPU v4": "TPU v4",
        "cpu": "CPU",
    }.items(),
)
def test_a_device_goes_by_the_names_that_people_and_jax_write(written, name):
    assert as_device(written).name == name
    assert as_device(as_device(written)).name == name


def test_no_name_is_that_of_two_devices():
    text = (resources.files("jmp_autocast") / "devices.toml").read_text("utf-8")
    for row in tomllib.loads(text)["device"]:
        for written in (row["name"], *row["names"]):
            assert device_of_kind(written).name == row["name"], written


def test_a_part_of_a_device_and_another_one_are_not_known():
    for kind in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40", "NVIDIA A100X", "TPU v9"):
        assert device_of_kind(kind) is None


def test_a_device_of_jax_is_taken_by_its_name():
    assert as_device(jax.devices()[0]).name == "CPU"


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWN)
def test_a_row_of_the_table_holds_together(name):
    device = KNOWN[name]
    generation = generation_of(device.platform, device.name, device.capability)
    units = set(generation.units) - {"blocks"}
    assert units == {x for x in ("bfloat16", "float16", "float8") if device.rate(x)}
    assert device.multiplies == generation.float32
    assert device.low == ("bfloat16" if "bfloat16" in units else "float16")
    # Sparsity doubles rates: a row that was copied from the wrong column stands out.
    low = device.rate(device.low)
    if device.tf32:
        assert 1.9 < low / device.tf32 < 2.1
    if device.float8:
        assert 1.9 < device.float8 / low < 2.1
    assert 1.9 < low / device.float32 < 40
    assert 70 < low / device.memory < 700  # FLOPs a byte
    assert device.link is None or 1 < device.memory / device.link < 40
    assert device.source.startswith("https://")
    assert re.fullmatch(r"20\d\d-\d\d", device.date)
    assert 0 < device.launch < 1e-5


def test_the_dtype_of_a_device_is_that_of_its_row():
    for device in known_devices():
        for choose in (choose_for, preferred_for):
            assert choose(hardware_of(device)).dtype.name == device.low


def test_a_device_by_its_rates_chooses_by_them():
    rates = {"float32": 10e12, "memory": 1e12}
    for more, dtype in {"bfloat16": "bfloat16", "float16": "float16", "float8": None}.items():
        choice = choose_for(hardware_of(Device("mine", **rates, **{more: 80e12})))
        assert (choice.dtype and choice.dtype.name) == dtype
        assert "mine" in choice.reason


# --- what is chosen for it ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype"), [("t4", "float16"), ("h100", "bfloat16"), ("v5e", "bfloat16")]
)
def test_the_dtype_is_that_of_the_device(device, dtype):
    for options in ({}, {"compute_dtype": "default"}, {"policy": Policy(level="compute")}):
        report = explain(model, *SHAPES, device=device, **options)
        assert report.compute_dtype == report.rows[0].operands[0] == dtype
        assert as_device(device).name in report.dtype_reason
    auto = autocast(model)
    assert explain(auto, *SHAPES, device=device).rows[0].operands[0] == dtype
    inside = jax.jit(autocast(model))
    assert explain(inside, *SHAPES, device=device).compute_dtype == dtype
    assert explain(model, *SHAPES, policy=BF16, device=device).compute_dtype == "bfloat16"


def test_what_is_traced_for_another_device_does_not_run_here():
    """JAX keeps the traces of a jitted function: the one for a T4 is another."""
    fn, x = jax.jit(autocast(jnp.matmul)), jnp.ones((8, 8))
    assert "float16" in explain(fn, x, x, device="t4").compute_dtype
    assert dot_dtypes(jax.make_jaxpr(fn)(x, x)) == [("bfloat16",) * 3]
    assert default_device().platform == "cpu"
    with supposing(KNOWN["T4"]):
        assert default_device().kind == "T4"
    assert default_device().platform == "cpu"


def test_float8_is_judged_by_the_device():
    policy = Policy(jnp.bfloat16, matmul="float8")
    with warnings.catch_warnings(action="error"):
        report = explain(model, *SHAPES, policy=policy, device="h100")
    assert report.totals.float8_share > 0.5
    assert report.roofline.speedup == pytest.approx(4, rel=0.05)
    with pytest.warns(UserWarning, match="T4 has no float8 units"):
        assert explain(model, *SHAPES, policy=policy, device="t4").totals.float8_share == 0


# --- the table of a program ---------------------------------------------------------------------


def test_fourteen_devices_take_one_trace():
    calls = []

    def counted(params, x):
        calls.append(1)
        return model(params, x)

    report = explain(counted, *SHAPES, device="all")
    assert len(report.devices) >= 14
    assert len(calls) == 1
    assert [time.device for time in report.devices] == [*KNOWN, "CPU"]


@pytest.fixture(scope="module")
def report():
    return explain(model, *SHAPES, device="all")


def test_seconds_by_the_rates(report):
    times = {time.device: time for time in report.devices}
    flops, small = 3 * 2 * 4096**3, 2 * 4 * 4096 * 8
    h100, v5e, t4 = (times[name] for name in ("H100 SXM", "TPU v5e", "T4"))
    for time, rate, seconds in [
        (h100, 66.9e12, h100.float32_seconds),
        (h100, 494.7e12, h100.default_seconds),
        (h100, 494.7e12, h100.tf32_seconds),
        (h100, 989.4e12, h100.low_seconds),
        (h100, 1978.9e12, h100.float8_seconds),
        (v5e, 197e12 / 6, v5e.float32_seconds),
        (v5e, 197e12, v5e.default_seconds),
        (t4, 8.1e12, t4.default_seconds),
        (t4, 65e12, t4.low_seconds),
    ]:
        launch = KNOWN[time.device].launch
        assert seconds == pytest.approx(flops / rate + max(launch, small / rate), rel=0.01)
    assert (t4.float8_seconds, t4.tf32_seconds, v5e.float8_seconds) == (None,) * 3
    assert (h100.dtype, h100.multiplies, t4.dtype, v5e.multiplies) == (
        *("bfloat16", "tf32"),
        *("float16", "bfloat16"),
    )


def test_what_gains_nothing_is_said_by_scope(report):
    times = {time.device: time for time in report.devices}
    (head,) = times["H100 SXM"].no_gain
    assert (head.scope, head.products, head.limit) == ("head", 1, "launches")
    layers, head = times["TPU v5e"].no_gain
    assert (layers.scope, layers.products, layers.limit) == ("layer_*", 3, "arithmetic")
    assert layers.because == "it multiplies float32 in bfloat16 by default"


def test_memory_that_gains_nothing():
    decode = explain(lambda w, x: x @ w, shape(4096, 4096), shape(1, 4096), device="a100")
    (scope,) = decode.devices[0].no_gain
    assert scope.limit == decode.devices[0].limit == "memory"
    assert scope.because == "it reads float32 arguments: cast_params stores 16 bits"
    pinned = BF16.with_rules({"dot_general": "FP32"})
    both = explain(
        lambda w, x: x @ w, shape(4096, 4096), shape(1, 4096), device="a100", policy=pinned
    )
    assert both.devices[0].no_gain[0].because == "as many bytes are moved"


def test_a_loop_that_runs_no_time_takes_none():
    fn = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=0)[0]
    (time,) = explain(fn, shape(8, 8), device="h100").devices
    assert (time.low_seconds, time.speedup) == (0, 1)


def test_four_by_four_is_no_gain():
    report = explain(jnp.matmul, shape(4, 4), shape(4, 4), device="h100")
    assert report.roofline.speedup == report.devices[0].speedup == 1
    assert "no gain on H100 SXM: too small" in str(report)
    assert "at most" not in str(report)


HEAD = r"^device +float32 +default +in +16 bits +in +float8 +wire +gain +limited by$"


def test_the_text_has_the_devices_that_were_asked_for():
    mine = Device("my card", float32=20e12, bfloat16=160e12, memory=1e12)
    text = str(explain(model, *SHAPES, device=("h100", mine, "cpu")))
    assert re.search(HEAD, text, re.MULTILINE)
    assert re.search(r"^H100 SXM .* tf32 .* bf16 .* 2 +arithmetic$", text, re.MULTILINE)
    assert re.search(r"^my card .* f32 .* bf16 +- +- +8 +arithmetic$", text, re.MULTILINE)
    assert re.search(r"^CPU .* f32 +- ", text, re.MULTILINE)
    assert re.search(r"no gain on H100 SXM +because$", text, re.MULTILINE)
    assert "T4" not in text
    assert "H100" not in str(explain(model, *SHAPES))
    assert all(len(line) <= 100 for line in text.splitlines())


def test_json_and_the_page_have_them(report):
    data = json.loads(report.to_json())
    h100 = next(time for time in data["devices"] if time["device"] == "H100 SXM")
    assert (h100["limit"], h100["no_gain"][0]["scope"]) == ("arithmetic", "head")
    # Nobody asked: all that are known are there, and the plan is that of the device at hand.
    unasked = explain(model, *SHAPES)
    assert len(json.loads(unasked.to_json())["devices"]) == len(KNOWN) + 1
    assert "H100 SXM" in unasked.to_html()
    assert unasked.dtype_reason == "the default on a CPU"


def gemma(params, tokens):
    """The loss of a Gemma 2 of 2 billion parameters: its shapes, and its products."""
    width, heads, groups, size = 2304, 8, 4, 256
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)

    def layer(x, w):
        with jax.named_scope("attention"):
            h = norm(x)
            q = (h @ w["q"]).reshape(1, length, groups, heads // groups, size)
            k, v = ((h @ w[name]).reshape(1, length, groups, size) for name in "kv")
            scores = jnp.where(mask, jnp.einsum("btkgh,bskh->bkgts", q, k) / 16, -1e30)
            mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v)
            x = x + norm(mixed.reshape(1, length, -1) @ w["o"])
        with jax.named_scope("mlp"):
            h = norm(x)
            return x + norm((jax.nn.gelu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]), None

    x = jax.lax.scan(layer, params["table"][tokens] * width**0.5, params["layers"])[0]
    with jax.named_scope("head"):
        return -jnp.mean(jax.nn.log_softmax(norm(x) @ params["table"].T)[..., 0])


def test_the_table_of_a_large_model_from_its_shapes():
    sizes = {"q": (2304, 2048), "k": (2304, 1024), "v": (2304, 1024), "o": (2048, 2304)}
    sizes |= {"gate": (2304, 9216), "up": (2304, 9216), "down": (9216, 2304)}
    params = {
        "table": shape(256_000, 2304),
        "layers": {name: shape(26, *size) for name, size in sizes.items()},
    }
    start = process_time()
    report = explain(gemma, params, shape(1, 4096, dtype=jnp.int32), device="all")
    assert process_time() - start < 15
    assert report.totals.low_share == 1
    h100 = next(each for each in report.devices if each.device == "H100 SXM")
    assert (h100.limit, h100.no_gain) == ("arithmetic", ())
    assert 2.5e13 / 989e12 < h100.low_seconds < 1.1 * 2.5e13 / 989e12
    assert 1.9 < h100.speedup < 2.1


# --- the wire -----------------------------------------------------------------------------------

MESH = jax.sharding.AbstractMesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
N = 4 * 1024 * 64  # the bytes of a float32 array of 1024 x 64


def parted(fn):
    return jax.shard_map(fn, mesh=MESH, in_specs=P("d"), out_specs=P("d"), check_vma=False)


@pytest.mark.parametrize(
    ("collective", "fn", "devices", "nbytes"),
    [
        ("psum", lambda x: jax.lax.psum(x, "d"), 4, 2 * 3 / 4 * N / 4),
        ("psum", lambda x: jax.lax.pmean(x, ("d", "m")), 8, 2 * 7 / 8 * N / 4),
        ("pmax", lambda x: jax.lax.pmax(x, "m"), 2, 2 * 1 / 2 * N / 4),
        ("all_gather", lambda x: jax.lax.all_gather(x, "d"), 4, 3 * N / 4),
        ("reduce_scatter", lambda x: jax.lax.psum_scatter(x, "d", tiled=True), 4, 3 / 4 * N / 4),
        ("all_to_all", lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True), 4, 3 / 4 * N / 4),
        ("ppermute", lambda x: jax.lax.ppermute(x, "d", [(0, 1), (1, 0)]), 4, N / 4),
    ],
)
def test_bytes_by_collective(collective, fn, devices, nbytes):
    (wire,) = explain(parted(fn), shape(1024, 64), policy=BF16).wire
    assert (wire.collective, wire.devices, wire.times) == (collective, devices, 1)
    assert (wire.dtype, wire.nbytes, wire.float32_nbytes) == ("float32", nbytes, nbytes)


def test_the_wire_counts_where_it_takes_longest():
    def step(x):
        with jax.named_scope("mlp"):
            return jax.lax.all_gather(jnp.tanh(x @ x.T), "d") * 2.0

    fn = parted(step)
    report = explain(fn, shape(4096, 64), policy=BF16, device=("h100", "l4", "mi250x"))
    (wire,) = report.wire
    assert wire.dtype == "bfloat16"
    assert wire.nbytes * 2 == wire.float32_nbytes == 3 * 4 * 1024**2
    h100, l4, unknown = report.devices
    assert h100.wire_seconds == pytest.approx(wire.nbytes / 0.45e12)
    assert l4.wire_seconds == pytest.approx(l4.default_wire_seconds / 2)
    assert (l4.limit, round(l4.speedup, 2)) == ("wire", 2)
    assert unknown.wire_seconds is None
    assert "6.29 MB by all_gather in bfloat16 over 4" in str(report)


def test_a_weight_is_gathered_in_the_dtype_in_which_it_is_read():
    """The plan gathers the float32 weight for a gradient that nobody takes: that is dead."""

    def step(params, x):
        return x @ jax.lax.all_gather(params["w"], "d", tiled=True)

    fn = jax.shard_map(step, mesh=MESH, in_specs=P("d"), out_specs=P("d"))
    arguments = {"w": shape(1024, 64)}, shape(64, 1024)
    for each in (fn, jax.jit(autocast(fn, policy=BF16))):
        policy = {"policy": BF16} if each is fn else {}
        (wire,) = explain(each, *arguments, **policy).wire
        assert (wire.dtype, wire.nbytes) == ("bfloat16", 3 / 4 * N / 2)


def test_a_wire_that_sends_as_much_gains_nothing():
    report = explain(parted(lambda x: jax.lax.psum(x @ x.T, "d")), shape(4096, 64), device="l4")
    assert report.roofline.says == "no gain on L4: the wire takes longest, and sends as many bytes"


def test_a_name_of_vmap_is_no_mesh():
    fn = jax.vmap(lambda x: jax.lax.all_gather(x @ x, "b"), axis_name="b")
    assert explain(fn, shape(2, 8, 8), policy=BF16).wire == ()


def test_a_name_without_a_mesh_counts_as_two_devices():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 4)])(shape(64))
    (wire,) = wire_of(jaxpr)
    assert (wire.devices, wire.nbytes) == (None, 4 * 64)


def test_what_the_partitioner_adds_is_not_known():
    split = NamedSharding(MESH, P("d"))
    says = "on one device: what XLA's partitioner splits and sends is not known"
    sharded = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=split)
    report = explain(jnp.matmul, sharded, sharded, device="h100")
    assert says in report.roofline.says
    constrained = lambda x: jax.lax.with_sharding_constraint(x @ x, split)
    assert says in explain(constrained, shape(4096, 4096), device="h100").roofline.says
    assert says not in explain(jnp.matmul, *SHAPES[1:] * 2, device="h100").roofline.says


def test_gradients_that_devices_add_in_float32_name_the_option():
    """A stack that is scanned in checkpoints, a head, and what is not weighted by a product."""

    def loss(params, x):
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        h, _ = jax.lax.scan(layer, x, params["stack"])
        h = jax.shard_map(lambda w, h: h @ w, mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d"))(
            params["mapped"], h + params["bias"]
        )
        return jnp.mean((h @ params["head"]) @ params["head"].T)

    split = NamedSharding(MESH, P(None, "d"))
    stack = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32, sharding=split)
    params = {"stack": stack, "bias": shape(64), "mapped": shape(64, 64), "head": shape(64, 8)}
    args, sent = (params, shape(8, 64)), 4 * (3 * 64 * 64 + 64 * 8)
    report = explain(loss, *args, policy=BF16)
    assert report.wide_gradient_nbytes == sent
    assert "weight_gradients='compute' sends 25.6 kB less" in str(report)
    # A gradient is reported as it runs.
    gradient = explain(jax.grad(autocast(loss, policy=BF16, params=0)), *args)
    assert gradient.wide_gradient_nbytes == sent
    for policy, on in ((Policy("bfloat16", weight_gradients="compute"), args), (BF16, SHAPES)):
        report = explain(loss if on is args else model, *on, policy=policy)
        assert "gradients" not in str(report)
        assert report.wide_gradient_nbytes == 0


# --- what is kept -------------------------------------------------------------------------------


def test_what_float32_would_keep_is_beside_it():
    def loss(params, x):
        return jnp.sum(jnp.sin(jnp.sin(x @ params["w"]) @ params["w"]))

    arguments = {"w": shape(64, 64)}, shape(32, 64)
    report = explain(loss, *arguments, policy=BF16)
    totals, array = report.totals, 32 * 64
    # Of both products the operand, and of both sines the derivative: in float32 the first operand
    # is the argument, which is in memory anyway.
    assert totals.residual_nbytes == 4 * 2 * array
    assert totals.declared_residual_nbytes == 3 * 4 * array
    assert "\ninstead of  24.6 kB of the program in float32\n" in str(report)
    # It is what the program keeps as it is written.
    params, x = arguments
    shapes = [params["w"], x]
    written = kept_bytes(lambda w, x: [loss({"w": w}, x)], shapes, [0])
    assert written.nbytes == totals.declared_residual_nbytes
    # What a gradient keeps is inside it.
    report = explain(jax.grad(loss), *arguments)
    assert report.totals.declared_residual_nbytes is None
    assert "instead of" not in str(report)
    less = keep_less(autocast(loss, policy=BF16), residuals="auto")
    assert explain(less, *arguments).totals.declared_residual_nbytes is None
