"""A part of a program in a call, a checkpoint or a custom rule changes nothing.

The property `calls` of the fuzzer, on the smallest programs that it has found. Each takes ``call``,
which wraps a part, and parameters and data.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, Policy, autocast
from tests.fuzz.comparison import as_numbers, interpreted
from tests.fuzz.segments import WRAPPERS, computed_in, difference, inline
from tests.support.numerics import normal, relative_error

PARAMS = normal(0, w=(8, 8), v=(8, 8), s=(8,), b=(8,))
X = normal(1, x=(8, 8))["x"]
POLICIES = {"bfloat16": BF16, "float16": FP16, "compute": Policy(jnp.bfloat16, level="compute")}


def centered(a):
    return a - jnp.mean(a, -1, keepdims=True)


def sum_of_norms(call, p, x):
    part = call(lambda a, b: (centered(a) + centered(b),))
    return part(x @ p["w"], x @ p["w"])[0] @ p["v"]


def complement(call, p, x):
    h = x @ p["w"]
    (a,) = call(lambda h: (jax.nn.sigmoid(h),))(h)
    return (1 - a) * h @ p["v"]


def snapped(call, p, x):
    part = call(lambda h: (h + 0.5,))
    return jnp.floor(part(x @ p["w"])[0]), part(x @ p["w"])[0] @ p["v"]


def last_branch(call, p, x):
    """What the last sum adds to was summed outside of the call, and nobody adds to it again."""
    h = x @ p["w"]
    h = h + jnp.tanh(h @ p["v"])
    return call(lambda h, y: (h + y,))(h, jnp.tanh(h @ p["w"]))[0] @ p["v"]


def bias(call, p, x):
    return call(lambda h, b: (h + b,))(x @ p["w"], p["b"])[0] @ p["v"]


def decay(call, p, x):
    (d,) = call(lambda h: (jax.nn.sigmoid(h),))(x @ p["w"])
    step = lambda c, _: (c * d + x, None)
    return jax.lax.scan(step, jnp.zeros_like(x), None, length=16)[0] @ p["v"]


def compared_with_a_number(call, p, x):
    """A threshold is no rank, also where the number is given to the part."""
    h = jax.nn.relu(x @ p["w"] + p["b"])
    (above,) = call(lambda h, least: (h > least,))(h, jnp.float32(0.5))
    return jnp.where(above, 1.0, 0.0) + h @ p["v"]


def two_readers_beside_a_result(call, p, x):
    """The part reads in float32 what it returns, and so does who moves that: one cast for both."""
    h, e = call(lambda a, b: ((h := a @ b), jnp.exp(h)))(x, p["w"])
    return jnp.exp(-jnp.abs(h)) + e


def sorted_together(call, p, x):
    """A sort stays in 16 bits for float32 readers: it is none that shares a cast."""
    part = call(lambda h: tuple(lax.sort((h, h), num_keys=1)))
    return tuple(map(jnp.exp, part(x @ p["w"])))


def residual(call, p, x):
    layer = call(lambda h, w: (h + jax.nn.relu(centered(h) @ w),))
    h = x @ p["w"]
    for _ in range(3):
        (h,) = layer(h, p["v"])
    return jnp.mean(centered(h) @ p["v"])


def gate(call, p, x):
    return call(lambda h, t: (h * t,))(x @ p["w"], x)[0] @ p["v"]


def narrowed_positions(call, p, x):
    """A part that casts positions, and multiplies them, gets them cast."""
    part = call(lambda t, a: (a @ t.reshape(4, 1).astype(a.dtype),))
    return part(jnp.linspace(0.0, 9.0, 4), x[:, :4].astype(jnp.float16))[0]


def determinant(call, p, x):
    a = x @ p["w"]
    (part,) = call(lambda a: (a[..., 0] * a[..., 1] + a[..., 2] * a[..., 3],))(a)
    return jnp.log(jnp.abs(part - a[..., 0] * a[..., 3]))


def logistic_loss(call, p, x):
    z = x @ p["w"]
    (relu,) = call(lambda z: (jnp.maximum(z, 0),))(z)
    return (relu - z * x + jnp.log1p(jnp.exp(-jnp.abs(z)))).mean()


def two_readers_and_product(call, p, x):
    part = call(lambda h: (jnp.maximum(h, 0) @ p["v"], jnp.exp(h).sum()))
    return part(x @ p["w"])


def split_for_two(call, p, x):
    """A moved value is read by a product and by a sum in float32."""
    (d,) = call(lambda a, b: (a * b,))(x, x)
    first, second = jnp.split(d, 2)
    return second + first @ p["w"]


def cotangents(call, p, x):
    """The sum of cotangents, in a loop's body and outside of it."""
    a = x @ p["w"]
    (mixed,) = call(lambda a, x: (-jnp.where(a > 0, a, 0.0) + jnp.where(a > 0, 0.0, a),))(a, x)
    return (mixed + x).T @ x


def narrowed_data(call, p, x):
    """What a product reads is data that a part has bounded."""
    (d,) = call(lambda a: (jnp.minimum(a, X[::-1]),))(x)
    return jax.nn.relu(d) @ p["w"]


def close_sigmoids(p, x):
    """Eight a row, of which 16 bits leave one or two."""
    return jax.nn.sigmoid(x @ p["w"] / 64 + 3)


def ranked_beside_product(call, p, x):
    """What a part ranks in float32, and a product in it reads, is not rounded before it."""
    s = close_sigmoids(p, x)
    return call(lambda s: (jnp.argmax(s, -1), s @ p["v"]))(s)


def compared_data_beside_product(call, p, x):
    """Data that a part compares in float32, and a product in it reads, is not rounded before it."""
    close = jnp.float32(1 - 2**-12) * x
    return call(lambda h, x: (h > x, h @ x))(jnp.cumsum(close, 0) - jnp.cumsum(close, 0) + close, x)


def returned_beside_sum(call, p, x):
    """What a part negates and returns is no read in float32, where another part sums it."""
    s = jnp.log1p(x @ p["w"]) @ p["v"]
    return call(lambda s: (-s,))(s)[0], jnp.cumsum(s, 0)


def distances(call, p, x):
    """The part knows that what comes in are squares: rounded, its product lost 18 % of these."""
    a, b = 1 + 0.1 * x, 1 + 0.1 * p["v"]
    part = call(lambda m, n, a, b: (m[:, None] + n - 2 * (a @ b.T),))
    return part(jnp.sum(a * a, -1), jnp.sum(b * b, -1), a, b)[0]


def not_normalized(call, p, x):
    """The part knows that an `exp` without a bound comes in: its product was infinite."""
    e = jnp.exp(2 * x @ p["w"])
    return call(lambda e, v: (e @ v,))(e, jnp.abs(p["v"]))[0] / jnp.sum(e, -1, keepdims=True)


def narrowed_to_another(call, p, x):
    """What the program rounds to a 16-bit dtype of its own is not rounded to another before."""
    formats = "float16", "bfloat16"
    other = lambda x: tuple(x.astype(f).astype("float32") for f in formats)
    return call(other)(x)


def gram(call, p, x):
    """Of a Gram matrix each factor may be rounded: that both are one is known inside, too."""
    h = x @ p["w"]
    (g,) = call(lambda a, b: (a @ b,))(h.T, h)
    return jnp.linalg.cholesky(g + jnp.eye(8))


def largest_outside(call, p, x):
    """The part knows that no element of one operand exceeds the other: its product is 16 bits."""
    s = x @ p["w"]
    part = call(lambda s, m: (jnp.exp(s - m) @ p["v"],))
    return part(s, jnp.max(s, -1, keepdims=True))


def largest_inside(call, p, x):
    """What a part returns beside a value is its largest element."""
    s, m = call(lambda x, w: ((h := x @ w).T, jnp.max(h, -1)))(x, p["w"])
    return jnp.exp(s - m) @ p["v"]


def largest_of_a_part(call, p, x):
    """What is less the largest of some of its elements has no bound: the product is float32."""
    s = x @ p["w"]
    part = call(lambda s, few: (jnp.exp(s - jnp.max(few, -1, keepdims=True)) @ p["v"],))
    return part(s, s[:, :2])


def declared(call, p, x):
    """A product whose result the program rounds reads float32, and a part that holds it, too."""
    dot = lambda a, b: (jnp.dot(a, b, preferred_element_type=jnp.bfloat16),)
    return call(dot)(jnp.arange(8.0) + 0.5, p["s"])


def weight_stream(call, p, x):
    """A stream over layers whose weight a function with a rule of its own gets in 16 bits."""
    layer = lambda w: lambda h, _: (h + h @ w, None)
    stream = lambda w: (jax.lax.scan(layer(w), w, None, length=2)[0],)
    return call(stream)(p["w"])[0] @ p["v"]


def of_few(call, p, x):
    """A product of four summed elements is one of elements: it reads what they read."""
    d = x @ p["w"]
    a = jax.nn.sigmoid(d)
    (both,) = call(lambda m, n: (m + n,))(x * d * (a * (1 - a)), (a - 1) * x)
    return both[:4].T @ x[:4]


def gram_of_results(call, p, x):
    """Two results of a part are one array, moved."""
    a, b = call(lambda x, w: ((h := x @ w).T, h[None]))(x, p["w"])
    return jnp.linalg.cholesky(a @ b[0] + jnp.eye(8))


def moved_through(call, p, x):
    """What comes back moved is read in float32, and by something else."""
    c = x @ p["w"]
    wide, rows = call(lambda c: (jnp.broadcast_to(c, (2, 8, 8)), c[::-1]))(c)
    return jnp.exp(wide), rows @ p["v"]


def largest_of_a_returned_part(call, p, x):
    few, s = call(lambda h: (h[:, :2], h.T))(x @ p["w"])
    return jnp.exp(s - jnp.max(few, -1)) @ p["v"]


def negated_beside_product(call, p, x):
    """A threshold outside of a part does not mind in which dtype the part negates a value."""
    t, y = call(lambda h: ((t := -jnp.exp(h)), t @ p["v"]))(x @ p["w"])
    return t > -0.5, y


def two_readers(call, p, x):
    """In a call, one reader of an operand asks for float32 and another does not care."""
    part = call(lambda h: (h < 0.5, jnp.sum(jnp.exp(h))))
    return part(x @ p["w"])


PROGRAMS = [
    function
    for function in list(globals().values())
    if inspect.isfunction(function)
    and [*inspect.signature(function).parameters] == ["call", "p", "x"]
]


def rewritten(program, call, policy):
    cast = autocast(lambda p, x: program(call, p, x), policy=policy, params=(0,))
    return jax.jit(cast).trace(PARAMS, X)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_call_changes_nothing(program, policy, jit_caches):
    plain = rewritten(program, inline, POLICIES[policy])
    values = [as_numbers(x) for x in interpreted(plain, (PARAMS, X))]
    for name, wrap in WRAPPERS.items():
        called = rewritten(program, wrap, POLICIES[policy])
        text = difference(computed_in(plain.jaxpr), computed_in(called.jaxpr))
        assert not text, f"{name}\n{text}"
        for value, x in zip(values, interpreted(called, (PARAMS, X)), strict=True):
            np.testing.assert_array_equal(as_numbers(x), value, name)


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_a_moving_variance_by_calls_is_right(policy):
    """`jnp.convolve` is a call. With its product rounded, the variance is 30 % off in bfloat16."""

    def variance(x):
        p = x @ np.eye(8, dtype=np.float32)
        mean = lambda a: jnp.convolve(a, jnp.ones(8) / 8, "valid")
        moving = mean(p[:, 0] ** 2) - mean(p[:, 0]) ** 2
        return moving.reshape(5, 5) @ np.eye(5, dtype=np.float32)

    # The product is exact.
    x = np.asarray(np.round(64 * (1 + 0.1 * normal(0, x=(32, 8))["x"])) / 64, np.float32)
    assert relative_error(autocast(variance, policy=POLICIES[policy])(x), variance(x)) < 0.016
