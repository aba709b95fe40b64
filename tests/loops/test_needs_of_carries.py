"""What the next iteration of a loop reads a carry for is known where the carry is made, on values.

A row is a function that reads what the step before it made, and one that makes it of a product.
The product is exact: `LEVELS` holds numbers of 8 bits, and the weight is the identity.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, autocast
from jmp_autocast.interpreters.plan import need_sweep
from jmp_autocast.interpreters.plan.needs import Need
from tests.fuzz.comparison import interpreted
from tests.support.steps import LOOPS

N, D = 16, 8
RNG = np.random.default_rng(0)
# Eight numbers in a row from 5 to 7, some of whose sigmoids are one number in 16 bits.
LEVELS = RNG.integers(160, 224, (N, 1)) + np.stack([RNG.permutation(D) for _ in range(N)])
ARGS = np.eye(D, dtype=np.float32), (LEVELS / 32).astype(np.float32)
HALF = np.eye(D, dtype=np.float32) / 2


sigmoid, tanh = jax.nn.sigmoid, lambda h: jnp.tanh(h / 2)
READ = {
    "argmax": (lambda s, _: jnp.argmax(s), sigmoid),
    "top_k": (lambda s, _: lax.top_k(s, 3)[1], tanh),
    "argsort": (lambda s, _: jnp.argsort(s), sigmoid),
    "comparison of steps": (lambda s, h: s[:, None] < sigmoid(h), sigmoid),
    "logarithm": (lambda s, _: jnp.log(1 - s), sigmoid),
    "inverse": (lambda s, _: jnp.arctanh(s), tanh),
    "difference from 1": (lambda s, h: (1 - s) * h, sigmoid),
    "product of all": (lambda s, _: jnp.cumprod(jnp.tile(s, 40)), sigmoid),
}


def error(fn, policy=None):
    """The distance from float32; of integers the share that differs."""
    run = lambda f: np.float64(interpreted(jax.jit(f).trace(*ARGS), ARGS)[0])
    want, found = run(fn), run(autocast(fn, policy=policy))
    if np.array_equal(want, np.round(want)):
        return np.mean(found != want)
    return np.linalg.norm(found - want) / np.linalg.norm(want)


def beside_a_product(read):
    """A product consumes what is read, too: nothing else keeps it in 16 bits."""

    def both(s, h):
        found = read(s, h)
        found = found.astype(int) if found.dtype == bool else found
        return found + 0 * jnp.sum(s @ HALF).astype(found.dtype)

    return both


READ = {name: (beside_a_product(read), make) for name, (read, make) in READ.items()}


def only_products(body, reads, known=need_sweep.read_by_the_next):
    return {k: need & Need.LEADS for k, need in known(body, reads).items()}


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", READ)
def test_the_next_step_reads_what_float32_makes(name, loop, policy):
    assert error(loop(*READ[name]), policy) <= 1e-5


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", READ)
def test_and_is_wrong_if_needs_do_not_go_round(name, loop, policy, monkeypatch):
    monkeypatch.setattr(need_sweep, "read_by_the_next", only_products)
    assert not error(loop(*READ[name]), policy) <= 0.004


def steps_while_it_grows():
    def run(w, x):
        rising = 5 + jnp.cumsum(jnp.sign(x), 0) / 32

        def step(carry):
            s = sigmoid(rising[carry[0]] @ w)
            return carry[0] + 1, s[0], carry[1], s @ w

        grows = lambda carry: (carry[0] < N) & (carry[1] > carry[2])
        return lax.while_loop(grows, step, (0, 1e-3 * x[0, 0], 0.0 * x[0, 0], x[0]))[0]

    return run


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bfloat16", "float16"])
def test_the_condition_of_a_loop_is_a_reader(policy, monkeypatch):
    assert error(steps_while_it_grows(), policy) == 0
    monkeypatch.setattr(need_sweep, "read_by_the_next", only_products)
    assert error(steps_while_it_grows(), policy) == 1
