"""Every primitive has its traits considered, and every structural one is known everywhere."""

import jax
import numpy as np
import pytest
from jax import lax

from jmp_autocast.interpreters.compat import bind, body_of, without_dead_equations
from jmp_autocast.interpreters.plan.structural import PLANNING_RULES, planning_rule
from jmp_autocast.interpreters.primitives import traits
from jmp_autocast.interpreters.primitives.evaluate import evaluate
from jmp_autocast.interpreters.primitives.reading import derivative_exponents
from jmp_autocast.interpreters.primitives.structure import STRUCTURES
from jmp_autocast.interpreters.primitives.traits import BACKWARD, FOLDS, TRAITS, having
from jmp_autocast.interpreters.rewrite.rewriter import REWRITING_RULES
from jmp_autocast.policies import CONTRACTIONS, DATA_MOVEMENT, DEFAULT_RULES, STRUCTURAL, CastPolicy

KEPT = {name for name, rule in DEFAULT_RULES.items() if rule is CastPolicy.KEEP}


def test_traits_are_considered_for_every_primitive_that_may_be_cast():
    casts = set(DEFAULT_RULES) - KEPT
    assert casts <= set(TRAITS), "add a row to primitives/traits.py"
    assert casts <= set(BACKWARD), "add a row to BACKWARD, in the same file"


def test_no_row_is_for_a_primitive_that_nobody_casts():
    assert set(TRAITS) <= (set(DEFAULT_RULES) - KEPT) | STRUCTURAL


def test_policies_and_traits_agree():
    assert having("moves") == DATA_MOVEMENT
    assert having("contracts") == CONTRACTIONS
    assert set(FOLDS) <= set(TRAITS)
    assert all(
        DEFAULT_RULES[name] is CastPolicy.PROMOTE
        for name in having("feeds") - {"div", "integer_pow"}
    )


@pytest.mark.parametrize("name", sorted(set(DEFAULT_RULES) - KEPT))
def test_what_follows_from_a_trait(name):
    has = TRAITS[name]
    assert "rounds" in has or not has & {"moves", "clears"}, "clears and moves say rounds"
    assert "feeds" in has or "sums" not in has
    assert "affine" in has or "shifts" not in has, "what adds integers makes integers"


@pytest.mark.parametrize(
    ("rows", "message"),
    [({"sin": "bended"}, "no such trait: bended"), ({"sin": "", "cos sin": ""}, "two rows")],
)
def test_a_wrong_row_is_an_error(rows, message):
    with pytest.raises(AssertionError, match=message):
        traits._read(rows)
    with pytest.raises(AssertionError, match="no such trait: bend"):
        having("bend")


def test_every_structural_primitive_is_planned_and_rewritten():
    assert set(STRUCTURES) | set(PLANNING_RULES) == STRUCTURAL
    assert all(planning_rule(name) is not None for name in STRUCTURAL)
    assert set(REWRITING_RULES) == set(STRUCTURES)


# --- the powers in JAX's derivatives ---

# Functions of elements that autocast may compute in 16 bits: the derivatives of the others are
# float32, as they are.
_FUNCTIONS = {
    name: getattr(lax, name)
    for name, words in BACKWARD.items()
    if "elementwise" in words and "flat" not in words and name in DEFAULT_RULES
    if DEFAULT_RULES[name] in (CastPolicy.PROMOTE, DEFAULT_RULES["div"])
    if "moves" not in TRAITS[name] and callable(getattr(lax, name, None))
}
_FUNCTIONS |= {f"power {n}": lambda x, n=n: lax.integer_pow(x, n) for n in (1, 2, 3, 4, 7)}
_FUNCTIONS.pop("select_n")  # linear, and of a predicate
_FUNCTIONS.pop("clamp")


def powers_in_derivative(fn, count, i):
    """The largest power of operand ``i`` in what JAX computes for the derivative by it."""
    ones = [jax.ShapeDtypeStruct((), np.float32)] * count

    def derivative(*xs):
        of_one = lambda x: fn(*xs[:i], x, *xs[i + 1 :])
        return jax.vjp(of_one, xs[i])[1](np.float32(1))

    jaxpr = without_dead_equations(body_of(jax.make_jaxpr(derivative)(*ones)))

    def values(x):
        found = []

        def step(_, eqn, operands):
            results = bind(eqn.primitive, operands, eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
            found.extend(np.abs(np.asarray(r, float)) for r in results)
            return results

        xs = [np.float32(1)] * count
        xs[i] = np.float32(x)
        evaluate(jaxpr, (), xs, lambda v: v.val, step)
        return np.array(found or [1.0])

    powers = []
    for small, large in ((2.0**-24, 2.0**-20), (2.0**10, 2.0**14)):
        with np.errstate(all="ignore"):
            powers.append(np.log2(values(large) / values(small)) / 4)
    powers = np.concatenate(powers)
    return max(powers[np.isfinite(powers)], key=abs, default=0)


@pytest.mark.parametrize("name", sorted(_FUNCTIONS))
def test_the_powers_in_derivatives_are_those_of_jax(name):
    fn, count = _FUNCTIONS[name], 2 if "replicates" in TRAITS.get(name, "") else 1
    (*_, eqn) = jax.make_jaxpr(fn)(*[1.5] * count).eqns
    table = derivative_exponents(eqn)
    for i in range(count):
        power = abs(powers_in_derivative(fn, count, i))
        if i in table:
            assert power == pytest.approx(abs(table[i]), abs=1e-3)
        # What an exponential takes may be beyond the range.
        assert power < 1.1 or i in table or name in ("erf", "erfc"), "add a row to DERIVATIVES"


@pytest.mark.parametrize("exponent", [-3, -2, -1, -2 / 3, -0.65, -1 / 2, 1 / 2, 1, 1.05, 2])
def test_powers_that_leave_float16(exponent):
    numbers = np.array([2.0**-24, 65504.0])
    with np.errstate(over="ignore"):
        is_finite = np.isfinite((numbers**exponent).astype(np.float16)).all()
    assert traits.leaves_float16(exponent) is not bool(is_finite)
