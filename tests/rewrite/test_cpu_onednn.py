"""Convolutions on CPUs: gradients of kernels as products, and oneDNN where the user asks for it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from benchmarks.fast_products import products_in, share_in_kernels
from jmp_autocast import BF16, autocast, compiler_options, cpu_kernels
from tests.fuzz.products import random_convolution
from tests.support.exact_products import error

OPTIONS = compiler_options()
ONEDNN = {cpu_kernels.ONEDNN: True}
BOUND = 0.005  # as in test_cpu_forms
NHWC = ("NHWC", "HWIO", "NHWC")
NWC, NDHWC = ("NWC", "WIO", "NWC"), ("NDHWC", "DHWIO", "NDHWC")

# Name, images, kernel, parameters, and the library that its forward pass runs in with the option.
FORMS = [
    ("3 x 3", (4, 16, 16, 32), (3, 3, 32, 32), {}, "onednn"),
    ("strided", (4, 16, 16, 32), (3, 3, 32, 32), {"window_strides": (2, 2)}, "onednn"),
    ("dilated", (4, 16, 16, 32), (3, 3, 32, 32), {"rhs_dilation": (2, 2)}, "onednn"),
    (
        "transposed",
        (4, 8, 8, 32),
        (3, 3, 32, 32),
        {"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2))},
        "onednn",
    ),
    (
        "transposed by 4",
        (4, 8, 8, 32),
        (5, 5, 32, 32),
        {"lhs_dilation": (4, 4), "padding": ((2, 3), (2, 3))},
        "",
    ),
    ("groups", (4, 16, 16, 32), (3, 3, 8, 32), {"feature_group_count": 4}, ""),
    ("depthwise", (4, 16, 16, 32), (3, 3, 1, 32), {"feature_group_count": 32}, "onednn"),
    ("1-D", (4, 64, 32), (5, 32, 32), {"dimension_numbers": NWC}, "onednn"),
    ("3-D", (2, 8, 8, 8, 16), (3, 3, 3, 16, 16), {"dimension_numbers": NDHWC}, "onednn"),
    (
        "features first",
        (4, 32, 16, 16),
        (32, 32, 3, 3),
        {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
        "onednn",
    ),
]


def convolved(kernel, images, params):
    rank = images.ndim - 2
    given = {"window_strides": (1,) * rank, "padding": "SAME", "dimension_numbers": NHWC}
    return lax.conv_general_dilated(images, kernel, **given | params)


@pytest.mark.parametrize("options", [None, ONEDNN], ids=["without", "with_option"])
@pytest.mark.parametrize(
    ("images", "kernel", "params", "library"),
    [row[1:] for row in FORMS],
    ids=[row[0].replace(" ", "_") for row in FORMS],
)
def test_digits_and_kernels_of_a_convolution(images, kernel, params, library, options):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (images, kernel))
    plain = functools.partial(convolved, params=params)
    low = autocast(plain, policy=BF16, compiler_options=options, output_dtype="computed")
    run = functools.partial(jax.jit, compiler_options=options)
    rounded = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in (w, x)]
    exact, pullback = jax.vjp(plain, *rounded)
    compiled = run(low).lower(w, x).compile()
    assert error(compiled(w, x), np.asarray(exact, np.float64)) < BOUND
    cotangent = jnp.asarray(rng.standard_normal(exact.shape), jnp.bfloat16)
    found = run(lambda w, x, g: jax.vjp(low, w, x)[1](g))(w, x, cotangent)
    for got, wide in zip(found, pullback(cotangent.astype(jnp.float32)), strict=True):
        assert error(got, np.asarray(wide, np.float64)) < BOUND
    if OPTIONS and options:
        kernels = {p.kernel for p in products_in(compiled.as_text()) if "bfloat16" in p.operands}
        assert kernels == ({library} if library else set())


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, images):
        norm = functools.partial(nn.BatchNorm, use_running_average=False)
        x = nn.relu(norm()(nn.Conv(32, (3, 3), use_bias=False)(images)))
        for features, by in ((32, 1), (64, 2)):
            y = nn.relu(norm()(nn.Conv(features, (3, 3), (by, by), use_bias=False)(x)))
            y = norm()(nn.Conv(features, (3, 3), use_bias=False)(y))
            if x.shape != y.shape:
                x = norm()(nn.Conv(features, (1, 1), (by, by), use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


def share_of_a_resnet(options):
    model, images = ResNet(), jnp.zeros((8, 32, 32, 3))

    def loss(params, state, images, labels):
        logits, _ = model.apply({"params": params, **state}, images, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    state = dict(jax.eval_shape(model.init, jax.random.key(0), images))
    step = jax.value_and_grad(autocast(loss, policy=BF16, compiler_options=options))
    args = state.pop("params"), state, images, jnp.zeros(8, jnp.int32)
    text = jax.jit(step, compiler_options=options).lower(*args).compile().as_text()
    return share_in_kernels(products_in(text)), products_in(text)


def test_the_convolutions_of_a_resnet_are_in_fast_kernels_or_nothing_is_lowered_for_them():
    share, products = share_of_a_resnet(OPTIONS)
    if OPTIONS:
        assert share > 0.95
    elif not cpu_kernels.cpu_kernels().wide:
        assert all(p.operands == ("float32", "float32") for p in products)
    # Without the option the gradients of kernels are: a third of the FLOPs.
    if cpu_kernels.cpu_kernels().wide:
        assert share_of_a_resnet(None)[0] > 0.3


@pytest.mark.parametrize("seed", range(10))
def test_a_random_convolution_with_the_option(seed):
    program = random_convolution(np.random.default_rng(seed))
    low = autocast(program.fn, policy=BF16, compiler_options=ONEDNN, output_dtype="computed")
    loss = lambda x, w: jnp.sum(low(x, w).astype(jnp.float32) ** 2)
    args = [x.astype(jnp.float32) for x in program.operands]
    found = jax.jit(low, compiler_options=ONEDNN)(*args)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), program.exact[0], rtol=0.01, atol=0.02
    )
    jax.jit(jax.grad(loss, (0, 1)), compiler_options=ONEDNN)(*args)


@pytest.mark.parametrize("options", [None, ONEDNN], ids=["without", "with_option"])
@pytest.mark.parametrize("by", [1, 2], ids=["plain", "with_holes"])
def test_a_convolution_that_is_cut_to_nothing(by, options):
    x, w = jnp.ones((1, 2, 2, 16)), jnp.ones((1, 1, 16, 16))
    params = {"padding": ((-1 - by, 0), (0, 0)), "lhs_dilation": (by, by)}
    plain = functools.partial(convolved, params=params)
    low = autocast(plain, policy=BF16, compiler_options=options)
    run = functools.partial(jax.jit, compiler_options=options)
    assert 0 in plain(w, x).shape
    assert run(low)(w, x).shape == plain(w, x).shape
    gradients = run(jax.grad(lambda w, x: jnp.sum(low(w, x)), (0, 1)))(w, x)
    assert not any(map(jnp.any, gradients))


def test_the_option_goes_through_vmap_and_second_derivatives():
    def loss(w, x):
        return jnp.sum(jnp.tanh(convolved(w, x, {})) ** 2)

    w, x = jnp.ones((3, 3, 4, 4)) / 9, jnp.ones((2, 3, 8, 8, 4))
    low = autocast(loss, policy=BF16, compiler_options=ONEDNN)
    fn = jax.vmap(jax.grad(lambda w, x: jnp.sum(jax.grad(low)(w, x) ** 2)), (None, 0))
    names = [
        eqn.params["onednn"]
        for eqn in jax.make_jaxpr(fn)(w, x).eqns
        if eqn.primitive.name == "accumulate"
    ]
    assert len(names) > 3
    assert all(names)


def test_without_the_option_a_program_is_as_before():
    fn = functools.partial(convolved, params={})
    w, x = jnp.ones((3, 3, 4, 4)), jnp.ones((2, 8, 8, 4))
    plain = autocast(fn, policy=BF16)
    assert autocast(fn, policy=BF16, compiler_options={}) == plain
    assert autocast(fn, policy=BF16, compiler_options={"xla_other": 1}) == plain
    with_option = autocast(fn, policy=BF16, compiler_options=ONEDNN)
    assert with_option != plain
    lowered = [
        jax.jit(f).trace(w, x).lower(lowering_platforms=("tpu",)).as_text()
        for f in (plain, with_option)
    ]
    assert lowered[0] == lowered[1]


@pytest.mark.parametrize(
    ("platform", "features", "convolves"),
    [
        ("gpu", {"amx_bf16"}, True),
        ("cpu", set(), True),
        ("cpu", {"amx_bf16"}, False),
        ("cpu", {"amx_bf16"}, True),
    ],
)
def test_when_there_are_options(platform, features, convolves, monkeypatch):
    import importlib

    module = importlib.import_module("jmp_autocast.compiler_options")
    device = module.default_device()._replace(platform=platform)
    monkeypatch.setattr(module, "default_device", lambda: device)
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(cpu_kernels, "_has_kernel", lambda dtype: True)
    monkeypatch.setattr(module, "onednn_convolves", lambda: convolves)
    cpu_kernels._kernels_with.cache_clear()
    try:
        found = compiler_options()
    finally:
        cpu_kernels._kernels_with.cache_clear()
    assert found == (ONEDNN if platform == "cpu" and features and convolves else {})
