"""Flax Linen: `autocast(model.apply)` as it is, and the adapter for parts of a model."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

import jmp_autocast
from jmp_autocast.integrations import linen
from tests.support.jaxprs import assert_dots_run_in, dot_dtypes, trace
from tests.support.numerics import assert_trees_near

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 8)).astype(np.float32)
KEY = jax.random.key(0)
KEYS = {"params": KEY, "dropout": jax.random.key(1)}
TOLERANCE = 3e-2  # of a gradient's norm, in bfloat16

LOW, FULL = ("bfloat16",) * 3, ("float32",) * 3
whole = functools.partial(jmp_autocast.autocast, policy=jnp.bfloat16)
part = functools.partial(linen.autocast, policy=jnp.bfloat16)


class Encoder(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(self.features)(x)
        x = nn.silu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
        self.sow("intermediates", "seen", x)
        return nn.Dropout(0.25, deterministic=not train)(x)

    @nn.compact
    def embed(self, x):
        return jnp.tanh(nn.Dense(4, name="embedding")(x))


@functools.cache
def variables():
    collections = jax.jit(Encoder().init)(KEYS, ROWS)
    return {name: collections[name] for name in ("params", "batch_stats")}


# --- a whole model, without an adapter ------------------------------------------------------

# What `apply` is asked for, beside variables and rows.
APPLY = {
    "evaluation": {"train": False},
    "mutable collections": {"mutable": ["batch_stats"], "rngs": {"dropout": KEY}},
    "all collections": {"mutable": True, "rngs": {"dropout": KEY}},
    "intermediates": {"capture_intermediates": True, "mutable": ["intermediates"], "train": False},
}


@pytest.mark.parametrize("name", APPLY)
def test_apply_with_its_options(name):
    apply = functools.partial(Encoder().apply, **APPLY[name])
    low = functools.partial(whole(Encoder().apply), **APPLY[name])
    assert_dots_run_in("bfloat16", trace(low, variables(), ROWS))
    got, want = jax.jit(lambda *a: (low(*a), apply(*a)))(variables(), ROWS)
    assert_trees_near(got, want, TOLERANCE)


def test_initialization_and_bound_modules():
    want = jax.eval_shape(Encoder().init, KEYS, ROWS)
    assert jax.eval_shape(whole(Encoder().init), KEYS, ROWS) == want
    low, plain = (jax.jit(fn)(KEYS, ROWS) for fn in (whole(Encoder().init), Encoder().init))
    chex.assert_trees_all_close(low["params"], plain["params"], rtol=1e-6)  # not rounded
    bound = Encoder().bind(variables())
    for call in (bound, bound.__call__):
        assert_dots_run_in("bfloat16", trace(lambda x, call=call: whole(call)(x, False), ROWS))


class DecoratedMethod(nn.Module):
    @nn.compact
    @whole
    def __call__(self, x):
        return nn.Dense(3)(x)


def test_apply_of_a_decorated_method():
    params = {"params": {"Dense_0": {"kernel": jnp.ones((8, 3)), "bias": jnp.ones(3)}}}
    assert_dots_run_in("bfloat16", trace(DecoratedMethod().apply, params, ROWS))
    out = jax.eval_shape(DecoratedMethod().apply, params, ROWS)
    assert (out.dtype, out.shape) == ("float32", (6, 3))


# --- a part of a model ----------------------------------------------------------------------


class Decorated(Encoder):
    __call__ = part(Encoder.__call__)


def by_function(**fields):
    """A function of a module, lifted where the module is."""
    module = Encoder(**fields)
    return lambda x, train=True: part(lambda m, x, train: m(x, train))(module, x, train)


PARTS = {
    "class": part(Encoder),
    "method": Decorated,
    "function": by_function,
    "remat inside": part(nn.remat(Encoder, static_argnums=(2,))),
    "remat outside": nn.remat(part(Encoder), static_argnums=(2,)),
    "jit outside": nn.jit(part(Encoder), static_argnums=(2,)),
}


class Net(nn.Module):
    """A part, and a layer in float32."""

    encoder: object = Encoder

    @nn.compact
    def __call__(self, x, train=True):
        x = self.encoder(name="encoder")(x, train)
        return nn.Dense(3)(x)


def loss(model):
    def fn(params, stats, x):
        out, state = model.apply(
            {"params": params, "batch_stats": stats},
            x,
            mutable=["batch_stats", "intermediates"],
            rngs={"dropout": KEY},
        )
        return jnp.mean(out**2), (out, state)

    return fn


def leaks_checked(name):
    """`nn.remat` keeps tracers of its own alive."""
    return jax.check_tracer_leaks("remat" not in name)


FLOAT32 = {"float32": Encoder, "float32 in jit": nn.jit(Encoder, static_argnums=(2,))}


def reference(name):
    """The float32 model to compare with: `nn.jit` makes other keys of those that it gets."""
    return "float32 in jit" if name == "jit outside" else "float32"


def results(make, *args):
    """``make(model)(*args)`` for the float32 models and those with a part, compiled together."""
    models = {name: Net(encoder) for name, encoder in {**FLOAT32, **PARTS}.items()}
    remat = {name: models.pop(name) for name in list(models) if "remat" in name}
    found = {}
    for group in (models, remat):
        with leaks_checked(next(iter(group))):
            run = jax.jit(lambda g, *a: {k: make(m)(*a) for k, m in g.items()}, static_argnums=0)
            found |= run(FrozenDict(group), *args)
    return found


@functools.cache
def initialized():
    return results(lambda model: functools.partial(model.init, KEYS), ROWS)


@functools.cache
def trained():
    """Gradients, and with them results and state, on the variables of the float32 model."""
    variables = initialized()["float32"]
    args = variables["params"], variables["batch_stats"], ROWS
    return args, results(lambda model: jax.grad(loss(model), has_aux=True), *args)


@pytest.mark.parametrize("name", PARTS)
def test_initialization_gives_the_same_variables(name):
    got, want = initialized()[name], initialized()[reference(name)]
    for collection in ("params", "batch_stats"):
        chex.assert_trees_all_equal_shapes_and_dtypes(got[collection], want[collection])
        chex.assert_trees_all_close(got[collection], want[collection], rtol=1e-2, atol=1e-2)
    kernel, exact = (v["params"]["encoder"]["Dense_0"]["kernel"] for v in (got, want))
    np.testing.assert_allclose(kernel, exact, rtol=1e-6)  # not rounded


@pytest.mark.parametrize("name", PARTS)
def test_a_part_trains_as_float32_does(name):
    args, found = trained()
    fn = loss(Net(PARTS[name]))
    with leaks_checked(name):
        assert dot_dtypes(trace(fn, *args)) == [LOW, FULL]
        backward = dot_dtypes(trace(jax.grad(fn, has_aux=True), *args))
    assert {dot[0] for dot in backward} == {"bfloat16", "float32"}  # in the part, and beside it
    (got, (out, state)), (want, (want_out, want_state)) = found[name], found[reference(name)]
    assert_trees_near(got, want, TOLERANCE)
    assert_trees_near(out, want_out, TOLERANCE)
    assert_trees_near(state, want_state, TOLERANCE)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + jnp.tanh(nn.Dense(8)(nn.LayerNorm()(x))), None


def stacked(layer, cast=lambda target: target):
    scan = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(cast(scan)(name="layers")(x, None)[0])

    return Stacked()


@pytest.mark.parametrize("model", [stacked(part(Layer)), stacked(Layer, part)], ids=["in", "out"])
def test_scan(model):
    plain = stacked(Layer)
    variables = jax.jit(plain.init)(KEY, ROWS)
    assert jax.eval_shape(model.init, KEY, ROWS) == jax.eval_shape(plain.init, KEY, ROWS)
    assert dot_dtypes(trace(model.apply, variables, ROWS)) == [LOW, FULL]

    def grad(model):
        return jax.jit(jax.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))(variables, ROWS)

    assert_trees_near(grad(model), grad(plain), TOLERANCE)


class Head(nn.Module):
    """A matmul's result is returned, and kept in a variable."""

    @nn.compact
    def __call__(self, x):
        last = self.variable("cache", "last", jnp.zeros, (6, 3))
        last.value = nn.Dense(3)(x)
        return last.value


@pytest.mark.parametrize(
    ("output_dtype", "expected"),
    [("same", "float32"), ("computed", "bfloat16"), ("float16", "float16")],
)
def test_the_output_dtype_is_not_that_of_the_variables(output_dtype, expected):
    model = part(Head, output_dtype=output_dtype)()
    collections = jax.eval_shape(Head().init, KEY, ROWS)
    out, state = jax.eval_shape(
        lambda v: model.apply(v, ROWS, mutable=["cache", "params"]), collections
    )
    assert out.dtype == expected
    assert state == collections


def test_other_methods_of_a_class():
    low = part(Encoder, methods=["embed"])
    params = jax.jit(functools.partial(Encoder().init, method="embed"))(KEY, ROWS)
    jaxpr = trace(functools.partial(low().apply, method="embed"), params, ROWS)
    assert dot_dtypes(jaxpr) == [LOW]
    jaxpr = trace(functools.partial(low().apply, train=False), variables(), ROWS)
    assert dot_dtypes(jaxpr) == [FULL]


class Nested(nn.Module):
    """A part in float32 inside a model in bfloat16."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        return linen.autocast(nn.Dense, enabled=False)(3)(x)


def test_a_part_governs_itself():
    params = jax.jit(Nested().init)(KEY, ROWS)
    assert dot_dtypes(trace(whole(Nested().apply), params, ROWS)) == [LOW, FULL]
