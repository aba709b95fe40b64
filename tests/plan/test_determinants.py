"""Small determinants, which are written out: products that cancel are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, autocast
from tests.support.plans import LOW, all_equations, plan_of

X = jax.random.normal(jax.random.key(0), (8, 8)) * 6
W = jax.random.normal(jax.random.key(1), (8, 16)) * 5  # |X @ W| reaches 324


def written_out(a):
    """Six products, as JAX 0.10 computes it; JAX 0.12 eliminates."""
    ((a, b, c), (d, e, f), (g, h, i)) = jnp.moveaxis(a, 0, -1)
    return a * e * i + b * f * g + c * d * h - c * e * g - b * d * i - a * f * h


CASES = {
    "written out": written_out,
    "det": jnp.linalg.det,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "sign and slogdet": jnp.linalg.slogdet,
    "triple product": lambda a: jnp.sum(a[:, 0] * jnp.cross(a[:, 1], a[:, 2]), axis=-1),
}
OF_THREE = ("written out", "triple product")
SIZES = [(name, n) for name in CASES for n in (2, 3, 4) if name not in OF_THREE or n == 3]
POLICIES = [Policy("float16"), Policy("bfloat16"), Policy("bfloat16", level="compute")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.compute_dtype}-{p.level}")
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_determinants_of_products(name, size, policy):
    def program(w, x):
        return CASES[name]((x @ w)[:, : size * size].reshape(-1, size, size))

    found, expected = autocast(program, policy=policy)(W, X), program(W, X)
    # An entry is off by half a unit in its last place at most, and the condition is at most 60.
    tolerance = 60 * float(jnp.finfo(policy.compute_dtype).eps) / 2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.all(jnp.isfinite(a))
        assert jnp.linalg.norm(a - b) <= tolerance * jnp.linalg.norm(b)


def test_sums_of_products_from_which_none_is_taken_keep_16_bits():
    # A gate of an LSTM: its backward pass would keep the factors in float32.
    x = np.ones((8, 8), np.float32)
    plan = plan_of(lambda a, b: (s := (a @ a) * (a @ b) + (b @ a) * (b @ b)) * jnp.exp(s), x, x)
    products = [p for e, p in all_equations(plan) if e.primitive.name == "mul"][:2]
    assert [p.results[0].dtype for p in products] == [LOW, LOW]


def test_the_logarithm_of_a_difference_of_products():
    # The sign, which nobody reads here, reads the difference in 16 bits as well: 300 * 300 is inf.
    x = jnp.zeros((8, 2)).at[:2].set(jnp.array([[300.0, 1.0], [2.0, 300.0]]))
    fn = autocast(lambda w, x: jnp.linalg.slogdet(w @ x)[1], policy=POLICIES[0])
    assert fn(jnp.eye(2, 8), x) == pytest.approx(11.4075, rel=1e-4)
