"""The plain `autocast` on Flax linen, Haiku and Equinox models, optax losses, jmp and chex."""

import functools

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from jmp_autocast import BF16, autocast
from tests.support.jaxprs import assert_dots_run_in, dot_dtypes, find, trace

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 6, 6, 2)).astype(np.float32)
ROWS = RNG.normal(size=(6, 8)).astype(np.float32)
LABELS = RNG.integers(0, 3, 6)
KEY = jax.random.key(0)

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}  # of a gradient's norm
bf16 = functools.partial(autocast, compute_dtype=jnp.bfloat16)


def filled(shapes):
    """Random parameters of these shapes: quicker than to compile an initialization."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: (
            jnp.asarray(rng.normal(0, 0.4, x.shape), x.dtype)
            if isinstance(x, jax.ShapeDtypeStruct)
            else x
        ),
        shapes,
    )


def assert_trains_in(dtype, grad, low_grad, *args):
    """Asserts that the gradient's matmuls are low, and its results near those of float32."""
    assert_dots_run_in(dtype, trace(low_grad, *args))
    got, want = jax.jit(lambda *a: (low_grad(*a), grad(*a)))(*args)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    assert any(g.dtype == "float32" for g in jax.tree.leaves(got))
    whole = np.sqrt(sum(np.sum(np.square(w)) for w in jax.tree.leaves(want)))
    for (path, g), w in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        scale = np.linalg.norm(w) + whole / 30  # what is zero is noise in proportion to the rest
        assert np.linalg.norm(g - w) <= TOLERANCE[dtype] * scale, path


# --- Flax linen -----------------------------------------------------------------------------


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(8)(x))
        return nn.Dense(3)(nn.LayerNorm()(x))


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.silu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
        x = x.reshape(len(x), -1)
        return nn.Dense(3)(nn.Dropout(0.25, deterministic=not train)(x))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(nn.Dense(8)(nn.LayerNorm()(x))), None


class Scanned(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers()(x, None)[0]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x[None]
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(x, x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.GRUCell(8))(x[None])


LINEN = {
    "dense": Dense(),
    "scan": Scanned(),
    "scan of remat": Scanned(remat=True),
    "attention": Attention(),
    "recurrent": Recurrent(),
}


@functools.cache
def variables_of(model, *args):
    arrays = {"rows": ROWS, "images": IMAGES}
    return filled(jax.eval_shape(lambda: model.init(KEY, *(arrays.get(a, a) for a in args))))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dense", "float16"), ("scan", "float16"), *((n, "bfloat16") for n in LINEN)],
)
def test_linen_trains(name, dtype):
    model = LINEN[name]

    def loss(variables, x):
        return jnp.mean(model.apply(variables, x) ** 2)

    low = autocast(loss, compute_dtype=dtype)
    assert_trains_in(dtype, jax.grad(loss), jax.grad(low), variables_of(model, "rows"), ROWS)


def conv_loss(params, stats, x, key):
    out, new = Conv().apply(
        {"params": params, "batch_stats": stats},
        x,
        True,
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    return jnp.mean(out**2), new["batch_stats"]


def test_linen_batch_stats_and_dropout():
    variables = variables_of(Conv(), "images", False)
    args = variables["params"], variables["batch_stats"], IMAGES, KEY
    grad, low = (jax.grad(fn, has_aux=True) for fn in (conv_loss, bf16(conv_loss)))
    assert_trains_in("bfloat16", grad, low, *args)
    stats = jax.eval_shape(low, *args)[1]
    chex.assert_trees_all_equal_shapes_and_dtypes(stats, variables["batch_stats"])
    assert len(find(trace(low, *args), "conv_general_dilated")) == 2


def test_linen_dropout_drops_the_same_units():
    def dropout(x, key):
        return nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key})

    got, want = jax.jit(lambda *a: (bf16(dropout)(*a), dropout(*a)))(jnp.ones((6, 8)), KEY)
    np.testing.assert_array_equal(got, want)


def test_linen_init_gives_float32_parameters():
    want = jax.eval_shape(Dense().init, KEY, ROWS)
    assert jax.eval_shape(bf16(Dense().init), KEY, ROWS) == want
    got, exact = jax.jit(lambda *a: (bf16(Dense().init)(*a), Dense().init(*a)))(KEY, ROWS)
    chex.assert_trees_all_close(got, exact, rtol=1e-6)


def test_linen_bound_modules():
    variables = variables_of(Dense(), "rows")
    bound = Dense().bind(variables)
    out = jax.jit(bf16(bound))(ROWS)
    np.testing.assert_allclose(out, bound(ROWS), atol=TOLERANCE["bfloat16"])
    assert_dots_run_in("bfloat16", trace(bf16(bound), ROWS))
    assert_dots_run_in("bfloat16", trace(bf16(bound.__call__), ROWS))


class Decorated(nn.Module):
    @nn.compact
    @bf16
    def __call__(self, x):
        return nn.Dense(3)(x)


def test_linen_apply_of_a_decorated_method():
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((8, 3)), "bias": jnp.ones(3)}}}
    assert_dots_run_in("bfloat16", trace(Decorated().apply, variables, ROWS))
    out = jax.eval_shape(Decorated().apply, variables, ROWS)
    assert (out.dtype, out.shape) == ("float32", (6, 3))


def test_linen_scopes():
    policy = BF16.with_scopes({"*/Dense_1": "float32"})

    def loss(variables, x):
        return jnp.mean(Dense().apply(variables, x) ** 2)

    jaxpr = trace(autocast(loss, policy=policy), variables_of(Dense(), "rows"), ROWS)
    assert [dot[0] for dot in dot_dtypes(jaxpr)] == ["bfloat16", "float32"]


def cross_entropy(variables, x, labels):
    logits = Dense().apply(variables, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_state():
    return TrainState.create(
        apply_fn=Dense().apply,
        params=variables_of(Dense(), "rows"),
        tx=optax.sgd(0.1, momentum=0.9),
    )


def make_step(loss_fn):
    def step(state, x, labels):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x, labels)
        return state.apply_gradients(grads=grads), loss

    return step


STEPS = {"loss": make_step(bf16(cross_entropy)), "whole step": bf16(make_step(cross_entropy))}


@pytest.mark.parametrize("name", STEPS)
def test_train_state_follows_float32_and_compiles_once(name):
    def run(step):
        chex.clear_trace_counter()
        with jax.check_tracer_leaks(False):  # which turns the caches of jit off
            step = jax.jit(chex.assert_max_traces(step, n=1))
            state, losses = train_state(), []
            for _ in range(3):
                state, loss = step(state, ROWS, LABELS)
                losses.append(loss)
            return state, losses

    state, losses = run(STEPS[name])
    want, want_losses = run(make_step(cross_entropy))
    assert state.step == 3
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE["bfloat16"])
    chex.assert_trees_all_equal_shapes_and_dtypes(state.params, want.params)
    chex.assert_trees_all_close(state.params, want.params, atol=TOLERANCE["bfloat16"])
    kernel = state.params["params"]["Dense_0"]["kernel"]  # a float32 value, not a rounded one
    assert (kernel != kernel.astype(jnp.bfloat16).astype(jnp.float32)).any()
    assert_dots_run_in("bfloat16", trace(STEPS[name], train_state(), ROWS, LABELS))


# --- Haiku ----------------------------------------------------------------------------------


def haiku_forward(x, train=True):
    x = hk.Conv2D(4, 3)(x)
    x = jax.nn.silu(hk.BatchNorm(True, True, 0.5)(x, is_training=train))
    x = hk.dropout(hk.next_rng_key(), 0.25, x)
    return hk.nets.MLP([8, 3], activation=jnp.tanh)(x.reshape(len(x), -1))


HAIKU = hk.transform_with_state(haiku_forward)


@pytest.fixture
def standard_promotion():
    """Haiku's moving averages add integers to floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_haiku_trains_with_state():
    def loss(params, state, key, x):
        out, state = HAIKU.apply(params, state, key, x)
        return jnp.mean(out**2), state

    params, state = filled(jax.eval_shape(HAIKU.init, KEY, IMAGES))
    grad, low = (jax.grad(fn, has_aux=True) for fn in (loss, bf16(loss)))
    assert_trains_in("bfloat16", grad, low, params, state, KEY, IMAGES)
    new = jax.eval_shape(low, params, state, KEY, IMAGES)[1]
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


def test_haiku_transform_of_an_autocast_function():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 3])(x)))
    params = filled(jax.eval_shape(model.init, KEY, ROWS))
    assert_dots_run_in("bfloat16", trace(bf16(model.apply), params, ROWS))
    assert jax.eval_shape(bf16(model.init), KEY, ROWS) == jax.eval_shape(model.init, KEY, ROWS)


# --- Equinox --------------------------------------------------------------------------------


class Perceptron(eqx.Module):
    norm: eqx.nn.LayerNorm
    layers: list
    activation: object = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.norm = eqx.nn.LayerNorm(8)
        self.layers = [eqx.nn.Linear(8, 8, key=keys[0]), eqx.nn.Linear(8, 3, key=keys[1])]
        self.activation = jnp.tanh

    def __call__(self, x):
        return self.layers[1](self.norm(self.activation(self.layers[0](x))))

    def loss(self, x):
        return jnp.mean(jax.vmap(self)(x) ** 2)


@functools.cache
def perceptron():
    return filled(eqx.filter_eval_shape(Perceptron, KEY))


def eqx_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


EQUINOX = {
    "argument": lambda cast: lambda m, x: cast(eqx_loss)(m, x),
    "method": lambda cast: lambda m, x: cast(m.loss)(x),
    "callable inside vmap": lambda cast: lambda m, x: jnp.mean(jax.vmap(cast(m))(x) ** 2),
    "unbound method": lambda cast: lambda m, x: cast(Perceptron.loss)(m, x),
    "filter_jit inside": lambda cast: cast(eqx.filter_jit(eqx_loss)),
    "filter_jit outside": lambda cast: eqx.filter_jit(cast(eqx_loss)),
}


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox_trains(name):
    grad = eqx.filter_grad(EQUINOX[name](lambda fn: fn))
    low = eqx.filter_grad(EQUINOX[name](bf16))
    assert_trains_in("bfloat16", grad, low, perceptron(), ROWS)


def test_equinox_filter_grad_of_a_model_with_static_leaves():
    mlp = functools.partial(eqx.nn.MLP, 8, 3, 8, 1, activation=jnp.tanh)  # which is a leaf
    model = filled(eqx.filter_eval_shape(mlp, key=KEY))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    got = eqx.filter_jit(eqx.filter_grad(bf16(loss)))(model, ROWS)
    want = eqx.filter_jit(eqx.filter_grad(loss))(model, ROWS)
    assert got.activation is want.activation
    g, w = got.layers[0].weight, want.layers[0].weight
    assert g.dtype == "float32"
    assert np.linalg.norm(g - w) <= TOLERANCE["bfloat16"] * np.linalg.norm(w)


def test_equinox_filter_jit_of_a_wrapped_model():
    out = eqx.filter_jit(bf16(perceptron()))(ROWS[0])
    assert out.dtype == "float32"
    np.testing.assert_allclose(out, perceptron()(ROWS[0]), atol=TOLERANCE["bfloat16"])


def test_equinox_stateful_layers():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")

    def forward(norm, state, x):
        return jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    def run(fn):
        return eqx.filter_jit(fn)(norm, state, ROWS)

    (out, new), (want, want_new) = run(bf16(forward)), run(forward)
    np.testing.assert_allclose(out, want, atol=TOLERANCE["bfloat16"])
    for got, expected in zip(jax.tree.leaves(new), jax.tree.leaves(want_new), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, atol=TOLERANCE["bfloat16"])
