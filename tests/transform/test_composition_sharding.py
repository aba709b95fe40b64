"""Sharded programs: shardings survive, and casts are made on the shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import FP16, Policy, autocast
from jmp_autocast.interpreters.plan import constant_range
from tests.support.jaxprs import assert_dots_run_in, find
from tests.support.numerics import assert_trees_close

SHAPE, NAMES = (4, 2), ("data", "model")
WEIGHTS = {"up": P(None, "model"), "down": P("model", None)}


def mesh(axis_type):
    return jax.make_mesh(SHAPE, NAMES, axis_types=(axis_type,) * 2)


def arguments(mesh):
    """A batch and two weights, sharded over data and over model."""
    draw = np.random.default_rng(0).standard_normal
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    weights = {
        "up": put(draw((16, 16), np.float32) / 4, WEIGHTS["up"]),
        "down": put(draw((16, 16), np.float32) / 4, WEIGHTS["down"]),
    }
    return weights, put(draw((32, 16), np.float32), P("data", None))


def forward(weights, x):
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def loss(weights, x):
    return jnp.mean(forward(weights, x) ** 2)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def test_autocast_of_a_jit_with_shardings():
    weights, x = arguments(mesh(AxisType.Auto))
    inner = jax.jit(
        forward,
        in_shardings=shardings((weights, x)),
        out_shardings=NamedSharding(mesh(AxisType.Auto), P("data", None)),
    )
    fn = autocast(inner, jnp.bfloat16)
    plain, cast = (jax.make_jaxpr(lambda *a, f=f: f(*a))(weights, x) for f in (inner, fn))
    (before,), (after,) = find(plain, "jit"), find(cast, "jit")
    for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts"):
        assert after.params[name] == before.params[name]
    assert_dots_run_in("bfloat16", cast)
    assert fn(weights, x).sharding == inner(weights, x).sharding


def test_sharding_constraint_inside():
    """The constraint stays in the program, on the value it was made for."""
    here = mesh(AxisType.Auto)

    def constrained(weights, x):
        hidden = jnp.tanh(x @ weights["up"])
        hidden = lax.with_sharding_constraint(hidden, NamedSharding(here, P("data", "model")))
        return jnp.mean((hidden @ weights["down"]) ** 2)

    weights, x = arguments(here)
    fn = jax.grad(autocast(constrained, jnp.bfloat16))
    plain, cast = (
        find(jax.make_jaxpr(lambda *a, f=f: f(*a))(weights, x), "sharding_constraint")
        for f in (jax.grad(constrained), fn)
    )
    assert [e.params["sharding"] for e in cast] == [e.params["sharding"] for e in plain]
    assert all(e.outvars[0].aval.dtype == jnp.bfloat16 for e in cast)
    assert_trees_close(jax.jit(fn)(weights, x), jax.jit(jax.grad(constrained))(weights, x), 4e-2)


def explicit_forward(weights, x):
    hidden = jnp.tanh(jnp.matmul(x, weights["up"], out_sharding=P("data", "model")))
    out = jnp.einsum("bh,ho->bo", hidden, weights["down"], out_sharding=P("data", None))
    bias = jnp.broadcast_to(jnp.float32(0.25), (32, 16), out_sharding=P("data", None))
    return jax.reshard(out + bias, P(None, None))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "derivative",
    [lambda f: f, lambda f: jax.grad(lambda *a: jnp.sum(f(*a) ** 2))],
    ids=["f", "grad"],
)
def test_explicit_mesh_axes(derivative, dtype):
    """Shardings are part of the types: those of the rewritten program are the plain one's."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        weights, x = arguments(mesh(AxisType.Explicit))
        plain = jax.jit(derivative(explicit_forward))
        cast = jax.jit(derivative(autocast(explicit_forward, dtype)))
        found = cast.trace(weights, x)
        assert found.out_info == plain.eval_shape(weights, x)
        assert_dots_run_in(dtype, found.jaxpr)
        assert_trees_close(found.lower().compile()(weights, x), plain(weights, x), 4e-2)


MEETINGS = {
    "add": lambda bias, x: x + bias,
    "broadcast_to": lambda bias, x: jnp.broadcast_to(bias, x.shape) * x,
    "scatter_add": lambda bias, x: x.at[0].add(bias, out_sharding=P("data", None)),
    "scatter": lambda bias, x: x.at[0].set(bias, out_sharding=P("data", None)),
    "embedding": lambda bias, x: (
        x + bias[:, None].at[jnp.arange(32) % 16].get(out_sharding=P("data"))
    ),
}


@pytest.mark.parametrize("broadcast", MEETINGS.values(), ids=MEETINGS)
def test_small_leaves_meet_explicitly_sharded_values(broadcast):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        weights, x = arguments(mesh(AxisType.Explicit))
        bias = jax.device_put(np.linspace(0, 1, 16, dtype=np.float32), P())
        weights["bias"] = bias

        def program(weights, x):
            hidden = jnp.matmul(x, weights["up"], out_sharding=P("data", "model"))
            hidden = jnp.matmul(hidden, weights["down"], out_sharding=P("data", None))
            return jnp.sum(broadcast(weights["bias"], hidden) ** 2)

        fn = jax.grad(autocast(program, jnp.bfloat16))
        found = jax.jit(fn).trace(weights, x)
        assert found.out_info == jax.eval_shape(jax.grad(program), weights, x)
        assert_trees_close(jax.jit(fn)(weights, x), jax.jit(jax.grad(program))(weights, x), 4e-2)


def collective(f, **options):
    specs = (WEIGHTS, P("data", None))
    here = mesh(AxisType.Auto)
    return lambda w, x: jax.shard_map(f, mesh=here, in_specs=specs, **options)(w, x)


COLLECTIVES = {
    "psum": lambda y: lax.psum(y, "model"),
    "psum_scatter": lambda y: lax.all_gather(
        lax.psum_scatter(y, "model", scatter_dimension=1, tiled=True), "model", axis=1, tiled=True
    ),
    "ppermute": lambda y: lax.ppermute(
        lax.psum(y, "model"), "data", [(i, i ^ 1) for i in range(4)]
    ),
    "pmax": lambda y: lax.psum(y, "model") - lax.pmax(lax.stop_gradient(y), "model"),
    "all_to_all": lambda y: lax.all_to_all(
        lax.all_to_all(y, "model", 1, 0, tiled=True), "model", 0, 1, tiled=True
    ),
    "axis_index": lambda y: y * (1 + lax.axis_index("model")).astype(y.dtype),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name, check_vma):
    if check_vma and name in ("psum_scatter", "all_to_all", "axis_index"):
        out_specs = P("data", None, "model")  # not known to be replicated over model
        reduce = lambda y: COLLECTIVES[name](y)[:, :, None]
    else:
        out_specs = P("data", None)
        reduce = COLLECTIVES[name]

    def program(weights, x):
        return reduce(forward(weights, x))

    def total(cast):
        mapped = collective(cast(program), out_specs=out_specs, check_vma=check_vma)
        return cast(lambda w, x: jnp.mean(mapped(w, x) ** 2))

    weights, x = arguments(mesh(AxisType.Auto))
    plain = jax.value_and_grad(total(lambda f: f))
    half = lambda f: autocast(f, jnp.bfloat16)
    # JAX itself leaks a tracer when it differentiates psum in a shard_map.
    with jax.check_tracer_leaks(False):
        found = jax.jit(jax.value_and_grad(total(half))).trace(weights, x)
        assert found.out_info == jax.eval_shape(plain, weights, x)
        expected = jax.jit(plain)(weights, x)
    assert_dots_run_in("bfloat16", found.jaxpr)
    sums = find(found.jaxpr, "psum", "psum_invariant", "reduce_scatter")
    assert all(v.aval.dtype == jnp.float32 for eqn in sums for v in eqn.invars)
    assert_trees_close(found.lower().compile()(weights, x), expected, 4e-2)


def test_what_no_process_holds_as_a_whole_is_not_searched_for_its_range(monkeypatch):
    """The numbers of an array that is spread over processes cannot be fetched."""
    weight, bias = (jnp.asarray(np.random.default_rng(k).random((16, 16))) for k in range(2))
    fn = autocast(lambda x: x @ weight * bias, jnp.bfloat16)
    monkeypatch.setattr(type(bias), "is_fully_addressable", False)
    monkeypatch.setattr(constant_range, "ConstantRange", lambda array: pytest.fail("searched"))
    assert_dots_run_in("bfloat16", jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((16, 16), jnp.float32)))


# --- FSDP: what travels between devices is 16 bits


def tower_loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x))


@pytest.fixture
def sharded():
    """Two square weights and a batch, each split by rows over the devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data", None))
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.device_put(jax.random.normal(k, (64, 64)) / 8, rows) for k in keys[:2]]
    return weights, jax.device_put(jax.random.normal(keys[2], (32, 64)), rows), rows


def gathered(compiled):
    """(dtype, shape) of what each all-gather of an optimized program moves."""
    return re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", compiled.as_text())


def test_gathered_parameters_are_16_bits(sharded):
    """float16, because XLA's CPU backend moves bfloat16 as float32.

    Of parameters alone: on a CPU the factors of a weight's gradient are widened where they lie.
    """
    weights, x, rows = sharded
    found = {}
    for name, fn in (("float32", tower_loss), ("float16", autocast(tower_loss, policy=FP16))):
        gradient = jax.jit(jax.grad(fn), out_shardings=[rows, rows])
        moved = gathered(gradient.lower(weights, x).compile())
        found[name] = [dtype for dtype, shape in moved if shape == "64,64"]
    assert found == {"float32": ["f32"] * len(weights), "float16": ["f16"] * len(weights)}


def test_parameters_gathered_by_a_constraint_are_16_bits(sharded):
    weights, x, rows = sharded
    whole = NamedSharding(rows.mesh, P())

    def gathering(weights, x):
        return tower_loss(lax.with_sharding_constraint(weights, whole), x)

    gradient = jax.jit(jax.grad(autocast(gathering, policy=FP16)), out_shardings=[rows, rows])
    moved = gathered(gradient.lower(weights, x).compile())
    assert moved == [("f16", "64,64")] * len(weights)


def reduced(compiled):
    """The dtypes of the arrays that all-reduces and reduce-scatters of a program add."""
    lines = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)\(", compiled.as_text())
    return {
        (dtype, shape) for line in lines for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", line)
    }


@pytest.mark.parametrize("layout", ["data parallel", "FSDP", "tensor parallel"])
def test_gradients_are_added_in_float32_and_activations_in_16_bits(layout, sharded):
    """As in layers with ``dtype=``, for the sums of a tensor-parallel product."""
    weights, x, rows = sharded
    whole, columns = NamedSharding(rows.mesh, P()), NamedSharding(rows.mesh, P(None, "data"))
    places = {"data parallel": [whole, whole], "FSDP": [rows, rows]}.get(layout, [columns, rows])
    if layout == "tensor parallel":
        x = jax.device_put(x, whole)
    gradient = jax.jit(jax.grad(autocast(tower_loss, policy=FP16)), out_shardings=places)
    found = reduced(gradient.lower(jax.device_put(weights, places), x).compile())
    if layout == "tensor parallel":
        assert {shape for dtype, shape in found if dtype == "f16"} == {"32,64"}
    else:
        assert {dtype for dtype, _ in found} == {"f32"}


# --- shard_map: what its body reads in 16 bits alone goes in, and travels, in 16 bits


def experts(x, gate, up, down, scale):
    """A block as a mixture of experts has it: weights that are gathered outside and inside."""
    h = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale
    h = jnp.einsum("bi,eio->beo", jax.nn.relu(h @ gate), up).sum(1)
    return x + h @ lax.all_gather(down, "data", tiled=True)


EXPERT_SPECS = (P("data"), P(), P(), P("data"), P())
EXPERT_SHAPES = ((16, 32), (8, 32, 24), (24, 16), (16,))


def experts_loss(here, wrap, check_vma=True):
    mapped = jax.shard_map(
        experts, mesh=here, in_specs=EXPERT_SPECS, out_specs=P("data"), check_vma=check_vma
    )
    explicit = AxisType.Explicit in here.axis_types
    whole = (lambda w: jax.reshard(w, P())) if explicit else (lambda w: w)

    def loss(weights, x):
        gate, up, down, scale = weights
        layer = wrap(lambda x, w: mapped(x, *map(whole, w[:2]), *w[2:]))
        return jnp.mean(layer(x, (gate, up, down, scale)) ** 2)

    return loss


def in_two_steps(f):
    return lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, length=2)[0]


EXPERTS = {
    "plain": (lambda f: f, AxisType.Auto, True),
    "unchecked": (lambda f: f, AxisType.Auto, False),
    "explicit": (lambda f: f, AxisType.Explicit, True),
    "scan of checkpoint": (lambda f: in_two_steps(jax.checkpoint(f)), AxisType.Auto, True),
}


def expert_arguments(here):
    draw = np.random.default_rng(2).standard_normal
    specs = (P("data"), P(None, "data"), P("data"), P())
    put = lambda x, spec: jax.device_put(np.float32(x), NamedSharding(here, spec))
    weights = [
        put(draw(shape) / 4 if len(shape) > 1 else np.ones(shape), spec)
        for shape, spec in zip(EXPERT_SHAPES, specs, strict=True)
    ]
    return weights, put(draw((32, 16)), P("data"))


@pytest.mark.parametrize("level", ["o1", "by_hand"])
@pytest.mark.parametrize("name", EXPERTS)
def test_what_a_shard_map_reads_low_enters_low(name, level):
    """And the gradients leave it as the policy says, to be float32 in the end."""
    wrap, axis_type, check_vma = EXPERTS[name]
    here = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    cast = lambda f: autocast(f, policy=Policy(np.float16, level=level))
    with jax.set_mesh(here):
        plain = experts_loss(here, wrap, check_vma)
        weights, x = expert_arguments(here)
        found = jax.jit(jax.grad(cast(plain))).trace(weights, x)
        assert found.out_info == jax.eval_shape(jax.grad(plain), weights, x)
        within = jax.make_jaxpr(cast(jax.grad(plain)))(weights, x)
        if (name, level) in (("explicit", "o1"), ("unchecked", "by_hand")):
            values = found.lower().compile()(weights, x)
            assert_trees_close(values, jax.jit(jax.grad(plain))(weights, x), 1e-2)
    of = lambda atoms: [
        {v.aval.dtype.name for v in atoms if v.aval.shape == shape} for shape in EXPERT_SHAPES
    ]
    # The source goes in, too, for its gradient in float32. No value there is made of it.
    kind = "float16" if level == "by_hand" else "float32"
    low = {"float16", kind}
    first, *_, last = find(found.jaxpr, "shard_map")
    assert of(first.invars) == [low, low, low, {"float32"}]
    assert of(last.outvars) == [{kind}, {kind}, {kind}, {"float32"}]
    assert_dots_run_in("float16", within)
