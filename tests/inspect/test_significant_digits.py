"""`significant_digits` against exact rationals, on programs that lose digits in known places."""

import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, significant_digits
from jmp_autocast.inspect.measure.random_rounding import ERRORS, draw_of, randomly_rounded

random = np.random.default_rng(0)
F = np.float32


def rump(a, b):
    a2, b2 = a * a, b * b
    b4 = b2 * b2
    b6, b8 = b4 * b2, b4 * b4
    # 333.75 b**6 and 5.5 b**8, with divisions that round nothing.
    return 1335 * b6 / 4 + a2 * (11 * a2 * b2 - b6 - 121 * b4 - 2) + 11 * b8 / 2 + a / (2 * b)


def discriminant(b, c):
    return b * b - c


def determinant(a, b, c, d):
    return a * d - b * c


def _near(x, share):
    return (x * (1 + share * random.standard_normal(x.shape))).astype(F)


X = random.uniform(1, 2, 64).astype(F)
Y = random.uniform(1, 2, 64).astype(F)
Z = random.uniform(1, 2, 64).astype(F)
# A program, and arguments under which it is ill-conditioned, or is not.
PROGRAMS = {
    "Kahan's discriminant": (discriminant, (X, _near(X * X, 1e-4))),
    "a harmless discriminant": (discriminant, (X, _near(X * X, 0.3) / 3)),
    "a determinant": (determinant, (X, Y, Z, _near(Y * Z / X, 1e-3))),
    "one without a digit": (determinant, (X, Y, Z, (Y * Z / X).astype(F))),
}


def right_digits(fn, args):
    """The digits of the array that a plain run gives, by exact rationals."""
    found = np.asarray(jax.jit(fn)(*args), np.float64)
    exact = [fn(*(Fraction(float(x)) for x in each)) for each in zip(*args, strict=True)]
    wrong = [float(Fraction(float(x)) - y) for x, y in zip(found, exact, strict=True)]
    ratio = np.linalg.norm(wrong) / np.linalg.norm(list(map(float, exact)))
    return max(-np.log10(ratio), 0)


@pytest.mark.parametrize(("fn", "args"), PROGRAMS.values(), ids=PROGRAMS)
def test_digits_are_those_of_exact_rationals(fn, args):
    found, exact = significant_digits(fn, *args).outputs[0].digits, right_digits(fn, args)
    # What all runs share in 95 of 100 cases is 0.6 digits fewer than what one run has on average.
    assert exact - 1.3 < found < exact + 0.2


@pytest.fixture(scope="module")
def of_rump():
    return significant_digits(jax.named_scope("rump")(rump), F(77617), F(33096))


def test_rump_has_no_digit(of_rump):
    exact = rump(Fraction(77617), Fraction(33096))
    assert float(exact).__round__(3) == -0.827
    assert of_rump.outputs[0].digits == 0
    # The sum in which all is lost.
    assert (of_rump.losses[0].primitive, of_rump.losses[0].digits) == ("add", 0)


def test_a_report_has_the_forms_of_the_others(of_rump):
    text = str(of_rump)
    assert text.startswith("rump: 0 digits are right in the worst of 1 output (8 samples)")
    assert " lost  equation" in text
    data = json.loads(of_rump.to_json())
    assert data["outputs"]["0"] == {"digits": 0.0, "fewest": 0.0, "dtype": "float32"}
    assert len(data["rows"]) == len(of_rump.rows)
    (scope,) = of_rump.by_scope()
    assert (scope.scope, scope.digits, scope.equations) == ("rump", 0, len(of_rump.rows))


def test_what_is_exact_stays_exact():
    def fn(x, n):
        counts = jnp.sum(n > 1.0, dtype=jnp.float32)
        return x - x, counts, jnp.eye(3) @ n[:3], jnp.exp(0 * n), n**2, jnp.sqrt(n * n), x * 4.0

    found = significant_digits(fn, X, np.arange(8, dtype=F))
    assert {each.fewest for each in found.outputs.values()} == {7.2}
    assert not found.losses


def lossy(y):
    return (y + 1e4) - 1e4


INSIDE = {
    "scan": lambda x: lax.scan(lambda h, y: (h, lossy(y * 1.1)), 0.0, x)[1],
    "while": lambda x: lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, lossy(s[1] * 1.1)), (0, x)
    )[1],
    "cond": lambda x: lax.cond(x[0] > 0, lambda: lossy(x * 1.1), lambda: x),
    "jit": jax.jit(lambda x: lossy(x * 1.1)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_loops_and_branches_round_too(name):
    found = significant_digits(INSIDE[name], X[:4])
    assert 2 < found.outputs[0].digits < 4
    worst = found.losses[0]
    assert (worst.primitive, worst.inside) == ("sub", () if name == "jit" else (name,))
    assert worst.runs == {"scan": 4, "while": 3}.get(name, 1)


def test_each_iteration_rounds_by_itself():
    # A mistake in each of 400 sums of one sign grows as a random walk, and would grow by 400 times
    # itself if all had one draw.
    def fn(x):
        return lax.fori_loop(0, 400, lambda i, y: y + x, x)

    found = significant_digits(fn, F(0.1), samples=16)
    assert 4.5 < found.outputs[0].digits < 6.5


def test_a_program_of_16_bits_has_their_digits():
    fn = autocast(lambda x, w: x @ w, policy=BF16, output_dtype="computed")
    found = significant_digits(fn, X[:32].reshape(8, 4), Y[:16].reshape(4, 4))
    assert found.outputs[0].dtype == "bfloat16"
    assert 1.5 < found.outputs[0].digits <= 2.4
    wide = significant_digits(lambda x, w: x @ w, X[:32].reshape(8, 4), Y[:16].reshape(4, 4))
    assert wide.outputs[0].digits > 6


def test_samples_and_seeds():
    args = X[:4], _near(X[:4] ** 2, 1e-3)
    found = [
        significant_digits(discriminant, *args, samples=n, seed=s)
        for n, s in ((2, 0), (20, 0), (20, 1))
    ]
    few, many, other = (each.outputs[0].digits for each in found)
    assert few < many  # two samples say little
    assert abs(many - other) < 0.5


def test_what_is_not_finite_has_no_digit():
    fn = lambda x: (jnp.where(x > 1.5, -jnp.inf, x * 1.1), 1 / (x * 1e-20 - x * 1e-20))
    masked, infinite = significant_digits(fn, X).outputs.values()
    assert masked.digits > 6
    assert infinite.digits == 7.2  # an infinity in all samples is no mistake


ONE_OPERATION = {
    "add": (jnp.add, 2),
    "sub": (jnp.subtract, 2),
    "mul": (jnp.multiply, 2),
    "div": (jnp.divide, 2),
    "sqrt": (jnp.sqrt, 1),
    "square": (lax.square, 1),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), 1),
}
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "square": lambda a: a * a,
    "convert_element_type": lambda a: a,
}


@pytest.mark.parametrize("dtype", [F, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", ONE_OPERATION)
def test_an_operation_gives_the_two_numbers_around_the_exact_result(name, dtype):
    fn, count = ONE_OPERATION[name]
    scale = 2.0 ** random.integers(-20, 20, 64)
    args = [jnp.asarray(x, dtype) for x in (X * scale, Y * scale[::-1])[:count]]
    closed = jax.make_jaxpr(fn)(*args)
    (eqn,) = closed.jaxpr.eqns
    assert eqn.primitive.name in ERRORS

    @jax.jit
    def samples(*args):
        run = lambda xs: [fn(*xs)]
        draws = jax.vmap(draw_of)(jnp.arange(32, dtype=jnp.uint32))
        return jax.vmap(lambda d: randomly_rounded(eqn, args, run, d)[0])(draws)

    found = np.asarray(samples(*args).astype(jnp.float32), np.float64)
    for k in range(64):
        values = [Fraction(float(x[k])) for x in args]
        low, high = (Fraction(float(f(found[:, k]))) for f in (np.min, np.max))
        if name == "sqrt":
            assert low**2 <= values[0] <= high**2
        else:
            exact = EXACT[name](*values)
            assert low <= exact <= high
            assert (low == high) == (low == exact)
        assert len(set(found[:, k])) <= 2
