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


def _near(x, share):
    return (x * (1 + share * random.standard_normal(x.shape))).astype(F)


X, Y, Z = random.uniform(1, 2, (3, 64)).astype(F)


def discriminant(b, c):
    return b * b - c


def determinant(a, b, c, d):
    return a * d - b * c


# A program, and arguments under which it is ill-conditioned, or is not.
PROGRAMS = {
    "Kahan's discriminant": (discriminant, (X, _near(X * X, 1e-4))),
    "a harmless discriminant": (discriminant, (X, _near(X * X, 0.3) / 3)),
    "a determinant": (determinant, (X, Y, Z, _near(Y * Z / X, 1e-3))),
    "one without a digit": (determinant, (X, Y, Z, (Y * Z / X).astype(F))),
}


@pytest.fixture(scope="module")
def digits():
    fns, args = zip(*PROGRAMS.values(), strict=True)
    found = significant_digits(lambda args: [f(*xs) for f, xs in zip(fns, args, strict=True)], args)
    return dict(zip(PROGRAMS, found.outputs.values(), strict=True))


def right_digits(fn, args):
    """The digits of the array that a plain run gives, by exact rationals."""
    found = np.asarray(fn(*args), np.float64)
    exact = [fn(*(Fraction(float(x)) for x in each)) for each in zip(*args, strict=True)]
    wrong = [float(Fraction(float(x)) - y) for x, y in zip(found, exact, strict=True)]
    ratio = np.linalg.norm(wrong) / np.linalg.norm(list(map(float, exact)))
    return max(-np.log10(ratio), 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_digits_are_those_of_exact_rationals(name, digits):
    found, exact = digits[name].digits, right_digits(*PROGRAMS[name])
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


def nested(x):
    step = lambda s: (s[0] + 1, lossy(s[1] * 1.1))
    return (
        lax.scan(lambda h, y: (h, lossy(y * 1.1)), 0.0, x)[1],
        lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1],
        lax.cond(x[0] > 0, lambda: lossy(x * 1.1), lambda: x),
        jax.jit(lambda x: lossy(x * 1.1))(x),
    )


def test_a_chain_of_elementwise_operations_compiles():
    # XLA for CPUs fused their roundings into one loop, and did not come back from compiling it.
    x = jnp.linspace(-2.0, 2.0, 128).reshape(8, 16)
    found = significant_digits(lambda x: jax.nn.gelu(x * x + x), x, samples=4)
    assert 5 < found.outputs[0].digits < 7.3


def test_loops_and_branches_round_too():
    found = significant_digits(nested, X[:4])
    assert all(2 < each.digits < 4 for each in found.outputs.values())
    lost = {row.inside: (row.primitive, row.runs) for row in found.losses}
    inside = {("scan",): 4, ("while",): 3, ("cond",): 1, (): 1}
    assert lost == {where: ("sub", runs) for where, runs in inside.items()}


def test_each_iteration_rounds_by_itself():
    # A mistake in each of 400 sums of one sign grows as a random walk, and would grow by 400 times
    # itself if all had one draw.
    def fn(x):
        return lax.fori_loop(0, 400, lambda i, y: y + x, x)

    found = significant_digits(fn, F(0.1), samples=16)
    assert 4.5 < found.outputs[0].digits < 6.5


def test_a_program_of_16_bits_has_their_digits():
    fn = autocast(lambda x, w: x @ w, policy=BF16, output_dtype="computed")
    found = significant_digits(fn, X.reshape(8, 8), Y.reshape(8, 8))
    assert found.outputs[0].dtype == "bfloat16"
    assert 1.5 < found.outputs[0].digits <= 2.4


def test_samples_and_seeds():
    args = X[:4], _near(X[:4] ** 2, 1e-3)
    fn = lambda b, c: significant_digits(discriminant, *args, samples=b, seed=c).outputs[0].digits
    few, many = fn(2, 0), fn(20, 1)
    assert few < many - 1  # two samples say little


def test_what_is_not_finite_has_no_digit():
    fn = lambda x: (jnp.where(x > 1.5, -jnp.inf, x * 1.1), 1 / (x - x))
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


@pytest.fixture(scope="module", params=[F, jnp.bfloat16], ids=["float32", "bfloat16"])
def samples(request):
    """Operands, and 32 results of each operation."""
    scale = 2.0 ** random.integers(-20, 20, 64)
    operands = [jnp.asarray(x, request.param) for x in (X * scale, Y * scale[::-1])]

    def run(*operands):
        draws = jax.vmap(draw_of)(jnp.arange(32, dtype=jnp.uint32))
        made = {}
        for name, (fn, count) in ONE_OPERATION.items():
            args = operands[:count]
            if name == "convert_element_type":
                args = [args[0].astype(jnp.float32)]
            (eqn,) = jax.make_jaxpr(fn)(*args).jaxpr.eqns
            assert eqn.primitive.name == name
            call = lambda d, eqn=eqn, args=args, fn=fn: randomly_rounded(
                eqn, args, lambda xs: [fn(*xs)], d
            )
            made[name] = jax.vmap(call)(draws)[0].astype(jnp.float32)
        return made

    return operands, jax.jit(run)(*operands)


@pytest.mark.parametrize("name", ONE_OPERATION)
def test_an_operation_gives_the_two_numbers_around_the_exact_result(name, samples):
    operands, made = samples
    found, count = np.asarray(made[name], np.float64), ONE_OPERATION[name][1]
    assert name in ERRORS
    for k in range(64):
        values = [Fraction(float(x[k])) for x in operands[:count]]
        low, high = Fraction(found[:, k].min()), Fraction(found[:, k].max())
        if name == "sqrt":
            assert low**2 <= values[0] <= high**2
        else:
            exact = EXACT[name](*values)
            assert low <= exact <= high
            assert (low == high) == (low == exact)
        assert len(set(found[:, k])) <= 2
