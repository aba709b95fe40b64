"""Elements of float32 values that are picked of the 16 bits they are computed from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, Policy, autocast
from jmp_autocast.interpreters.compat import variables_in
from jmp_autocast.interpreters.primitives.picking import _compared, pick
from jmp_autocast.interpreters.primitives.structure import equations_in
from tests.support.jaxprs import casts, find, trace
from tests.support.numerics import relative_error

ROWS, LENGTH, VOCABULARY = 2, 6, 32
# Rounds wherever the program does, and is one compilation.
compiled = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
keys = jax.random.split(jax.random.key(0), 4)
W = jax.random.normal(keys[0], (8, VOCABULARY))
B = jax.random.normal(keys[1], (VOCABULARY,))
X = jax.random.normal(keys[2], (ROWS, LENGTH, 8))
Y = jax.random.randint(keys[3], (ROWS, LENGTH), 0, VOCABULARY)


def along_axis(logits, y):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)


def vmapped(logits, y):
    one = lambda logits, y: jax.nn.log_softmax(logits)[y]
    return jax.vmap(jax.vmap(one))(logits, y)


def first_axis(logits, y):
    turned = jnp.moveaxis(jax.nn.log_softmax(logits), -1, 1)
    return jnp.take_along_axis(turned, y[:, None], 1)


def by_hand(logits, y):
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    normalizer = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    return jnp.take_along_axis(logits, y[..., None], -1)[..., 0] - normalizer


def of_optax(logits, y):
    return -optax.softmax_cross_entropy_with_integer_labels(logits, y)


def soft_capped(logits, y):
    return along_axis(5 * jnp.tanh(logits / 5), y)


FORMS = [
    along_axis, vmapped, first_axis, by_hand, of_optax, soft_capped,
]  # fmt: skip


def loss(form, params, x, y):
    return -jnp.mean(form(x @ params["w"] + params["b"], y))


@functools.cache
def gradients_by_hand(dtype, form):
    loss = functools.partial(by_hand_in, dtype, form)
    return compiled(jax.grad(loss))({"w": W, "b": B}, X, Y)


def by_hand_in(dtype, form, params, x, y):
    logits = x.astype(dtype) @ params["w"].astype(dtype) + params["b"].astype(dtype)
    if form is soft_capped:  # the cap by hand in 16 bits, as the model is
        logits, form = 5 * jnp.tanh(logits / 5), along_axis
    return -jnp.mean(form(logits.astype(jnp.float32), y))


@functools.cache
def exactly(form):
    return jax.jit(jax.value_and_grad(functools.partial(loss, form)))({"w": W, "b": B}, X, Y)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", [BF16, Policy(jnp.bfloat16, level="compute"), FP16])
def test_values_and_gradients_are_those_of_the_plain_program(form, policy):
    params = {"w": W, "b": B}
    low = autocast(functools.partial(loss, form), policy=policy)
    value, grads = compiled(jax.value_and_grad(low))(params, X, Y)
    expected, exact = exactly(form)
    hand = gradients_by_hand(policy.compute_dtype, form)
    np.testing.assert_allclose(value, expected, rtol=2e-2)
    for name in params:
        error = np.linalg.norm(grads[name] - exact[name])
        assert error <= 1.2 * np.linalg.norm(hand[name] - exact[name]) + 1e-6
        assert grads[name].dtype == jnp.float32


@pytest.mark.parametrize("policy", [BF16, FP16])
@pytest.mark.parametrize("form", [along_axis, first_axis, vmapped])
def test_what_an_operation_broadcasts_has_one_element_for_all_indices(form, policy):
    # The deviation of a row: its label was looked for in the one element, and NaN for most.
    fn = lambda w, x, y: form(jax.nn.standardize(x @ w), y)
    found = jax.jit(autocast(fn, policy=policy))(W, X, Y)
    np.testing.assert_allclose(found, fn(W, X, Y), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", [along_axis, vmapped, soft_capped])
def test_the_value_is_computed_from_elements_of_the_logits(form):
    jaxpr = trace(autocast(form, policy=BF16), jnp.ones((ROWS, LENGTH, VOCABULARY)), Y)
    (logits, _), (value,) = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
    needed, picked = {value}, []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            # XLA drops what is there for the gradient alone.
            is_view = eqn.primitive.name == "source_view"
            needed.update(variables_in(eqn.invars[is_view:]))
            picked += [eqn.invars[0]] * (eqn.primitive.name == "pick")
    views = {e.outvars[0]: e.invars[1] for e in find(jaxpr, "source_view")}
    assert [views[v] for v in picked] == [logits]


@pytest.mark.parametrize("form", [along_axis, vmapped, of_optax, first_axis])
def test_no_gradient_is_scattered_where_a_row_has_one_label(form):
    wrapped = autocast(functools.partial(loss, form), policy=BF16)
    jaxpr = jax.make_jaxpr(jax.grad(wrapped))({"w": W, "b": B}, X, Y)
    scatters = [e for e, _ in equations_in(jaxpr) if e.primitive.name == "scatter-add"]
    assert not [e for e in scatters if e.outvars[0].aval.size >= ROWS * LENGTH * VOCABULARY]


@pytest.mark.parametrize("form", [by_hand, of_optax])
@pytest.mark.parametrize("level", ["o1", "compute"])
def test_a_confident_label_keeps_its_gradient(form, level):
    """p - 1 at p = 0.9990: 16-bit terms of softmax and label gave 0."""
    w = jnp.eye(VOCABULARY) * 0.5
    x = 20.5 * jax.nn.one_hot(jnp.array([[3]]), VOCABULARY)
    y = jnp.array([[3]])
    plain = lambda x, w, y: -jnp.mean(form(x @ w, y))
    exact = jax.jit(jax.grad(plain))(x, w, y)
    policy = Policy(jnp.bfloat16, level=level)
    found = compiled(jax.grad(autocast(plain, policy=policy, params=1)))(x, w, y)
    label = exact[0, 0, 3]
    assert -1e-2 < label < 0
    np.testing.assert_allclose(found[0, 0, 3], label, rtol=1e-2)


def mean_of_labels(w, x, y):
    return -jnp.mean(along_axis(x @ w, y))


def over_rows(w, x, y):
    step = lambda total, xy: (total + mean_of_labels(w, *xy), None)
    return lax.scan(step, 0.0, (x[:, None], y[:, None]))[0]


TRANSFORMED = {
    "scan": (over_rows, lambda f: compiled(jax.grad(f))(W, X, Y)),
    "checkpoint": (jax.checkpoint(mean_of_labels), lambda f: compiled(jax.grad(f))(W, X, Y)),
    "vmap": (mean_of_labels, lambda f: compiled(jax.vmap(jax.grad(f), (None, 0, 0)))(W, X, Y)),
    "hessian": (mean_of_labels, lambda f: compiled(jax.hessian(lambda s: f(W * s, X, Y)))(1.0)),
    "jvp": (
        mean_of_labels,
        lambda f: compiled(lambda w: jax.jvp(lambda w: f(w, X, Y), (w,), (w,))[1])(W),
    ),
}


@pytest.mark.parametrize(("plain", "run"), TRANSFORMED.values(), ids=TRANSFORMED)
def test_picks_under_transformations(plain, run):
    found, expected = run(autocast(plain, policy=BF16, params=0)), run(plain)
    assert relative_error(found, expected) <= 2e-2


def test_rows_that_are_picked_for_a_matmul_stay_in_16_bits():
    def plain(w, x, position):
        hidden = jnp.tanh(x @ w)
        chosen = jnp.take_along_axis(hidden, position, 1)
        return chosen @ w.T

    jaxpr = jax.make_jaxpr(autocast(plain, policy=BF16))(
        W, X, jnp.zeros((ROWS, 1, VOCABULARY), int)
    )
    (gather,) = [e for e, _ in equations_in(jaxpr) if e.primitive.name == "gather"]
    assert gather.outvars[0].aval.dtype == jnp.bfloat16


def test_pick_is_linear_in_its_operand_alone():
    x, index = jax.random.normal(keys[0], (3, 5)), jnp.array([[4], [0], [9]])
    expected = jnp.array([[x[0, 4]], [x[1, 0]], [0]])
    np.testing.assert_array_equal(pick(x, index, 1), expected)
    out, tangent = jax.jvp(lambda x: pick(x, index, 1), (x,), (2 * x,))
    np.testing.assert_array_equal(tangent, 2 * out)
    (found,) = jax.linear_transpose(lambda x: pick(x, index, 1), x)(jnp.ones((3, 1)))
    np.testing.assert_array_equal(found.sum(1), [1, 1, 0])
    batched = jax.vmap(lambda x, i: pick(x, i, 0))(x, index)
    np.testing.assert_array_equal(batched, expected)
    shared = jax.vmap(lambda x: pick(x, jnp.array([1]), 0))(x)
    np.testing.assert_array_equal(shared[:, 0], x[:, 1])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
def test_narrow_labels_name_one_position_of_a_long_row(dtype):
    x, index = jnp.arange(600.0)[None], jnp.array([[3]], dtype)
    assert pick(x, index, 1) == 3
    assert jax.grad(lambda x: pick(x, index, 1).sum())(x).sum() == 1

    def clipped(x):
        logits = jax.nn.log_softmax(x @ jnp.eye(600))
        return jnp.take_along_axis(logits, index, 1, mode="clip")

    found = compiled(jax.grad(lambda x: autocast(clipped, policy=BF16)(x).sum()))(x / 600)
    expected = jax.jit(jax.grad(lambda x: clipped(x).sum()))(x / 600)
    assert jnp.linalg.norm(found - expected) <= 1e-2 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("index_dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
def test_a_tpu_picks_the_same_bits(dtype, index_dtype):
    x = jax.random.normal(keys[0], (4, 300), dtype).at[:, 7].set(jnp.inf)
    index = jnp.array([[3], [7], [127], [0]], index_dtype)
    np.testing.assert_array_equal(_compared(x, index, axis=1, outside=0.0), pick(x, index, 1))
    for fill in (0.0, np.nan, -2.0):
        beside = jnp.array([[3], [300], [-1], [7]])
        results = _compared(x, beside, axis=1, outside=fill), pick(x, beside, 1, fill)
        # NumPy takes no NaN of bfloat16 for another one.
        found, gathered = (np.asarray(result, np.float32) for result in results)
        np.testing.assert_array_equal(found, gathered)
        np.testing.assert_array_equal(found[1:3], np.full((2, 1), fill))


@pytest.mark.parametrize(
    ("platforms", "gathers"), [(("tpu",), False), (("cpu",), True), (("cuda",), True)]
)
def test_a_tpu_compares_where_others_gather(platforms, gathers):
    """So that XLA divides logits by rows where the vocabulary is split over devices, too."""
    loss = autocast(lambda x, w: along_axis(x @ w, Y).sum(), policy=BF16)
    traced = jax.jit(loss).trace(X, W)
    assert ("gather" in traced.lower(lowering_platforms=platforms).as_text()) is gathers


def test_several_platforms_are_exported():
    loss = autocast(lambda x, w: along_axis(x @ w, Y).sum(), policy=BF16)
    exported = jax.export.export(jax.jit(loss), platforms=("cpu", "tpu", "cuda"))(X, W)
    np.testing.assert_array_equal(exported.call(X, W), jax.jit(loss)(X, W))


@pytest.mark.parametrize(
    ("mode", "outside"),
    [
        ("fill", False),
        ("fill", True),
        ("clip", False),
        ("clip", True),
        ("promise_in_bounds", False),
    ],
)
def test_a_label_out_of_range_is_what_the_gather_says(mode, outside):
    y = Y.at[0, 0].set(VOCABULARY + 3 if outside else 1)

    def loss(x):
        logp = jax.nn.log_softmax(x @ W)
        return jnp.take_along_axis(logp, y[..., None], -1, mode=mode)[..., 0]

    found, expected = autocast(loss, policy=BF16)(X), loss(X)
    np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(expected))
    assert bool(jnp.isnan(found[0, 0])) is (outside and mode == "fill")
    np.testing.assert_allclose(found[1:], expected[1:], rtol=0.05, atol=0.05)
    gradient = compiled(jax.grad(lambda x: autocast(loss, policy=BF16)(x)[1:].sum()))(X)
    assert bool(jnp.isfinite(gradient).all())


@pytest.mark.parametrize("fill", [np.nan, 0.0])
def test_equations_change_no_fill_value(fill):
    y = Y.at[0, 0].set(VOCABULARY + 3)

    def masked(x):
        logits = 2 * (x @ W)
        logp = jax.nn.log_softmax(jnp.where(logits > 99, -1e9, logits))
        return jnp.take_along_axis(logp, y[..., None], -1, mode="fill", fill_value=fill)

    np.testing.assert_array_equal(autocast(masked, policy=BF16)(X)[0, 0], [fill])


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("policy", [BF16, Policy(jnp.bfloat16, level="compute"), FP16])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("log", [True, False])
def test_a_certain_label_has_no_negative_loss(policy, cast, log):
    """XLA leaves out the rounding of what is read in float32, and so of what is picked."""

    def losses(w, x, y):
        logits = x @ w
        logits = logits.astype(jnp.bfloat16).astype(jnp.float32) if cast else logits
        p = jax.nn.log_softmax(logits) if log else jnp.log(jax.nn.softmax(logits))
        return -jnp.take_along_axis(p, y[:, None], -1)[:, 0]

    w = 0.5 * jax.random.normal(keys[0], (256, 10))
    x = jax.random.normal(keys[1], (64, 256))
    y = jnp.argmax(x @ w, -1)
    run = jax.jit(jax.value_and_grad(lambda *args: autocast(losses, policy=policy)(*args).sum()))
    found = jax.jit(autocast(losses, policy=policy))(w, x, y)
    exact = jax.jit(losses)(w, x, y)
    assert float(found.min()) > -1e-6  # -0.05 for elements of the rounded logits
    np.testing.assert_allclose(found, exact, atol=0.08)
    total, gradient = run(w, x, y)
    assert abs(float(total) - float(exact.sum())) < 0.05 * float(exact.sum())
    assert bool(jnp.isfinite(gradient).all())


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_elements_are_picked_from_the_float32_copy_that_others_read(form):
    """A compiler may leave out the rounding of one of two copies alone."""
    jaxpr = trace(autocast(lambda w, x, y: form(x @ w, y), policy=BF16), W, X, Y)
    assert {e.invars[0].aval.dtype for e in find(jaxpr, "pick", "gather")} == {np.dtype("float32")}
    shapes = [e.invars[0].aval.shape for e in casts(jaxpr, "bfloat16", "float32")]
    assert shapes.count((ROWS, LENGTH, VOCABULARY)) == 1


@jax.custom_jvp
def picks_in_its_rule(x):
    return jnp.sin(x)[jnp.arange(ROWS), Y[:, 0]]


@picks_in_its_rule.defjvp
def _picks_in_its_rule_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return picks_in_its_rule(x), (jnp.cos(x) * t)[jnp.arange(ROWS), Y[:, 0]]


def test_a_rule_that_picks_elements_of_a_tangent():
    # An implicit solver does so. The elements are linear in the tangent, and are transposed.
    x = X[:, 0, :] @ W
    loss = lambda x: jnp.sum(picks_in_its_rule(x) ** 2)
    for transform in (lambda f: f, jax.checkpoint, jax.jit):
        found = jax.jit(jax.grad(transform(autocast(loss, policy=BF16))))(x)
        np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(x), rtol=1e-6)
