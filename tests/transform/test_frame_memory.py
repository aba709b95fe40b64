"""What a call calls runs in the piece of memory that the call has taken."""

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import autocast, keep_less
from jmp_autocast.frame_memory import with_frame_memory


def deep(depth, call):
    return call() if depth == 0 else deep(depth - 1, call)


def test_a_program_is_the_same_at_each_depth():
    loss = autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), compute_dtype=jnp.bfloat16)
    w, x = jnp.ones((8, 8)) / 8, jnp.ones((4, 8))
    texts = {
        str(deep(depth, lambda: jax.make_jaxpr(jax.grad(loss))(w, x))) for depth in range(0, 120, 7)
    }
    assert len(texts) == 1


def test_recursion_in_a_function_is_as_deep_as_without():
    def loss(w, depth):
        return deep(depth, lambda: jnp.sum(w * w))

    for transform in (autocast, lambda f: keep_less(f, residuals="recompute")):
        value = transform(lambda w: loss(w, 400))(jnp.arange(3.0))
        np.testing.assert_allclose(value, 5.0)


def test_only_the_size_of_the_frame_differs():
    def add(x, y=2, *, z: int = 3):
        """Adds."""
        return x + y + z

    before = add.__code__
    assert with_frame_memory(add) is add
    assert add(1) == 6
    # CPython rounds up to a power of two: what is left of 1 MB holds 1,000 frames of 400 bytes.
    assert 400_000 < 8 * add.__code__.co_stacksize < 600_000
    assert add.__code__.replace(co_stacksize=before.co_stacksize) == before


def test_an_error_names_the_users_line():
    def fails(w):
        raise ValueError("here")

    try:
        autocast(fails)(jnp.ones(2))
    except ValueError as error:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        assert last.tb_frame.f_code is fails.__code__
    else:
        raise AssertionError("no error")
