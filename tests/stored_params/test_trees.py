"""`cast_params` and `quantize_params` of trees: abstract, sharded, donated, restored and traced."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import BF16, Float8, Policy, autocast, cast_params
from jmp_autocast.quantize_params import quantize_params
from tests.support.numerics import normal

FP8 = Policy(jnp.bfloat16, matmul=Float8(minimum=16, skip=(), emulate=True))
TOOLS = pytest.mark.parametrize(
    ("tool", "policy"), [(cast_params, BF16), (quantize_params, FP8)], ids=["cast", "quantize"]
)
K = 32
PARAMS = normal(0, w=(K, K), stack=(3, K, K), scale=(K,))
X = normal(1, x=(16, K))["x"]

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def program(p, x):
    layers = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["stack"])[0]
    return (layers * jnp.exp(p["scale"]) / 8) @ p["w"]


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@TOOLS
def test_sharded_abstract_donated_and_restored(tool, policy, tmp_path):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"w": P("d"), "stack": P(None, "d"), "scale": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = jax.device_put(PARAMS, shardings)
    fn = autocast(program, policy=policy, params=0)
    small = tool(fn, params, X)
    abstract = tool(fn, jax.tree.map(like, params), jax.eval_shape(lambda: X))
    assert jax.tree.map(like, small) == abstract
    values = [jax.tree.leaves(small[name])[0] for name in shardings]
    assert [x.sharding for x in values] == [*shardings.values()]
    low = jnp.bfloat16 if tool is cast_params else jnp.float8_e4m3fn
    assert [x.dtype for x in values] == [low, low, jnp.float32]
    # The values are those of one device, and so is each scale on every device.
    alone = tool(fn, PARAMS, X)
    assert_equal(small, alone)
    if tool is quantize_params:
        assert small["w"].scale.sharding == NamedSharding(mesh, P())
        assert len({float(s.data) for s in small["w"].scale.addressable_shards}) == 1
    # Orbax restores in the dtypes and shardings of the abstract tree, also from float32.
    saved = params if tool is cast_params else small
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", abstract)
    assert_equal(restored, small)
    assert jax.tree.map(like, restored) == abstract
    # XLA sums in another order on eight devices: float32 rounding, and its steps to bfloat16.
    np.testing.assert_allclose(jax.jit(fn)(restored, X), jax.jit(fn)(alone, X), atol=0.1)


@TOOLS
def test_linen_variables_nnx_state_and_traced_parameters(tool, policy):
    model = nn.Sequential([nn.Dense(K), nn.LayerNorm(), nn.Dense(K)])
    variables = model.init(jax.random.key(0), X)
    small = tool(model.apply, variables, X, policy=policy)
    kernels = [small["params"][f"layers_{i}"]["kernel"] for i in (0, 2)]
    assert {jax.tree.leaves(k)[0].dtype.itemsize for k in kernels} == {
        2 if tool is cast_params else 1
    }
    assert small["params"]["layers_1"]["scale"].dtype == jnp.float32
    run = jax.jit(autocast(model.apply, policy=policy))
    np.testing.assert_array_equal(run(small, X), run(variables, X))

    graph, state = nnx.split(nnx.Linear(K, K, rngs=nnx.Rngs(0)))
    run = autocast(lambda state, x: nnx.merge(graph, state)(x), policy=policy)
    stored = tool(run, state, X)
    assert type(stored) is type(state)
    assert jax.tree.leaves(stored["kernel"])[0].dtype.itemsize < 4
    # In a jitted function parameters have no values: it is the plan that says what is stored.
    assert_equal(jax.jit(lambda state: tool(run, state, X))(state), stored)
    np.testing.assert_array_equal(jax.jit(run)(stored, X), jax.jit(run)(state, X))
