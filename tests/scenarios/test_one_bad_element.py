"""One NaN or infinity in an argument reaches the loss, the tools and the loss scale.

XLA:CPU drops a NaN from a maximum of about 4,096 float32 numbers or more.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_autocast import (
    Float8,
    Policy,
    autocast,
    check_numerics,
    compare,
    dynamic_loss_scaling,
    explain,
    scaled_value_and_grad,
)
from jmp_autocast.loss_scaling import loss_scale
from jmp_autocast.policies.choices import LEVELS

SCALE = 4.0
POLICIES = {
    **{level: Policy(jnp.float16, level=level) for level in LEVELS},
    **{
        scaling: Policy(jnp.float16, matmul=Float8(scaling=scaling, minimum=8, multiple=1, skip=()))
        for scaling in ("tensor", "row")
    },
}
BAD = (np.nan, np.inf)


def loss(w, x, target):
    return jnp.mean((x @ w / x.shape[1] - target) ** 2)


def arguments(size):
    """A weight and data with so many elements, and a target."""
    rows = 40 if size == 1_000 else 400
    draw = np.random.default_rng(0).standard_normal
    shapes = (rows, size // rows), (size // rows, rows), (size // rows, size // rows)
    return [draw(shape).astype(np.float32) for shape in shapes]


def with_bad_elements(good):
    """The arguments with one bad element in one of them."""
    for i in range(3):
        for bad in BAD:
            args = [arg.copy() for arg in good]
            args[i].reshape(-1)[args[i].size // 3] = bad
            yield args


@pytest.mark.filterwarnings("ignore:A CPU has no float8 units:UserWarning")
@pytest.mark.parametrize("size", [1_000, 100_000])
@pytest.mark.parametrize("name", POLICIES)
def test_it_reaches_the_loss_the_tools_and_the_loss_scale(name, size):
    fast = autocast(loss, policy=POLICIES[name], params=0)
    tx = dynamic_loss_scaling(optax.sgd(0.1), init_scale=SCALE)

    @jax.jit
    def step(w, x, target):
        state = tx.init(w)
        value, grads = scaled_value_and_grad(fast)(state, w, x, target)
        _, state = tx.update(grads, state, w)
        return value, loss_scale(state)

    checked = check_numerics(fast)
    good = arguments(size)
    (reason,) = [r.reason for r in explain(fast, *good).rows if r.primitive == "dot_general"]
    assert (reason == "FLOAT8") == (POLICIES[name].matmul is not None)
    value, scale = step(*good)
    assert np.isfinite(value)
    assert scale == SCALE
    assert checked(*good) == pytest.approx(float(value), rel=1e-2)
    assert compare(fast, *good).outputs[0].error < 0.1
    for args in with_bad_elements(good):
        value, scale = step(*args)
        assert not np.isfinite(value)
        assert scale == SCALE / 2
        with pytest.raises(FloatingPointError, match=r"NaN|infinit"):
            checked(*args)
        comparison = compare(fast, *args)
        assert not comparison.outputs[0].error < 0.1
        assert "outputs err by nan" in comparison.summary


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_it_reaches_a_report_of_a_compiled_check(size):
    collected = jax.jit(check_numerics(autocast(loss, jnp.bfloat16), mode="collect"))
    good = arguments(size)
    assert "all is finite" in collected(*good)[1].summary
    for args in with_bad_elements(good):
        _, report = collected(*args)
        assert report.first is None
        assert report.passed_on
        assert "an argument holds one" in report.summary


def test_an_argument_is_named_and_a_mask_is_no_fault():
    def masked(scores, mask):
        return jax.nn.softmax(scores + mask)

    x, mask = np.ones(4, np.float32), np.float32([0, 0, -np.inf, 0])
    check_numerics(masked)(x, mask=mask)
    assert not check_numerics(masked, mode="collect")(x, mask)[1].passed_on
    with pytest.raises(FloatingPointError, match=r"holds one: 0/scores/0, mask\. Pass"):
        check_numerics(lambda s, mask: masked(s["scores"][0], mask))(
            {"scores": [x * np.nan]}, mask=mask
        )


def test_of_nothing_finite_no_error_is_known():
    """Neither 0 nor a small one, for an output, a gradient and a named value."""
    square = lambda x: jnp.sum(x * x)
    x = np.float32([np.nan])
    found = compare(square, x, argnums=0)
    assert np.isnan([found.outputs[0].error, found.gradient_error]).all()
    both = compare(square, x, against=jax.jit(square))
    assert both.first_beyond(1e9).name == "output 0"
    assert "err by nan" in both.summary
