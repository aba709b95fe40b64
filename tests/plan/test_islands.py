"""Islands: scopes in float64 of a program in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, FP16, Policy, autocast, compute_precision, explain
from tests.support.jaxprs import equations, find, floats_of, trace

SINGLE, DOUBLE = np.dtype("float32"), np.dtype("float64")
ISLAND = BF16.with_scopes({"*chol*": "float64"})
RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 6)).astype(np.float32)


pytestmark = pytest.mark.usefixtures("float64")


def logdet(x):
    gram = x @ x.T
    with jax.named_scope("cholesky"):
        # Of condition 1e7: in float32 it is not positive definite.
        factor = jnp.linalg.cholesky(gram @ gram.T + 1e-4 * jnp.eye(6, dtype=x.dtype))
    return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))


def dtypes(fn, *args):
    return floats_of(trace(fn, *args))


@pytest.mark.parametrize("policy", [ISLAND, FP16.with_scopes({"*chol*": "float64"})])
def test_an_island_runs_in_float64_and_nothing_else_does(policy):
    fn = autocast(logdet, policy=policy, params=())
    found = dtypes(fn, X)
    low = np.dtype(policy.compute_dtype)
    assert found["cholesky"] == {DOUBLE}
    assert found["dot_general"] == {low, DOUBLE}
    assert found["log"] == found["reduce_sum"] == {SINGLE}
    assert fn(X).dtype == SINGLE
    assert jax.grad(fn)(X).dtype == SINGLE


def test_an_island_has_the_digits_of_float64():
    policy = ISLAND.with_rules({"dot_general": "float32"})
    exact = logdet(X.astype(np.float64))
    found = autocast(logdet, policy=policy, params=())(X)
    np.testing.assert_allclose(found, exact, rtol=1e-4)
    scale = np.abs(jax.grad(logdet)(X.astype(np.float64))).max()
    gradient = jax.grad(autocast(logdet, policy=policy, params=()))(X)
    exact = jax.grad(logdet)(X.astype(np.float64))
    np.testing.assert_allclose(gradient, exact, atol=1e-3 * scale)


def loops(x):
    with jax.named_scope("chol"):

        def step(carry, row):
            return carry + jnp.exp(row @ x), jnp.sum(row)

        total, sums = lax.scan(step, jnp.zeros(6, x.dtype), x)
        root = lax.while_loop(
            lambda c: c[1] < 3, lambda c: ((c[0] + 2 / c[0]) / 2, c[1] + 1), (sums[0] ** 2 + 1, 0)
        )
        chosen = lax.cond(x[0, 0] > 0, lambda y: y, jnp.exp, total)
    return chosen @ x + root[0], sums


def test_loops_and_branches_of_an_island_are_float64():
    fn = autocast(loops, policy=ISLAND, params=())
    found = dtypes(fn, X)
    assert found["exp"] == found["div"] == {DOUBLE}
    for name in ("scan", "while", "cond"):
        (eqn,) = (e for e in equations(trace(fn, X)) if e.primitive.name == name)
        floats = {v.aval.dtype for v in eqn.outvars if v.aval.dtype.kind == "f"}
        assert floats == {DOUBLE}, name
    out, sums = jax.jit(fn)(X)
    assert out.dtype == sums.dtype == SINGLE
    exact, exact_sums = loops(X.astype(np.float64))
    np.testing.assert_allclose(sums, exact_sums, rtol=1e-6)
    np.testing.assert_allclose(out, exact, atol=0.02 * np.abs(exact).max())


@jax.custom_jvp
def cubed(x):
    return x**3


@cubed.defjvp
def _(primals, tangents):
    return cubed(*primals), 3 * primals[0] ** 2 * tangents[0]


def test_a_derivative_rule_in_an_island_runs_in_float64():
    def fn(x):
        with jax.named_scope("chol"):
            return jnp.sum(cubed(x) - x * x * x)

    mixed = autocast(fn, policy=ISLAND, params=())
    found = dtypes(jax.value_and_grad(mixed), X)
    assert found["integer_pow"] == found["reduce_sum"] == {DOUBLE}
    # In float32 the rounding of each product is left: 1e-7.
    np.testing.assert_allclose(jax.grad(mixed)(X), 0, atol=1e-14)


def by_lu(gram, b):
    return jnp.linalg.solve(gram, b)


def by_cg(gram, b):
    return jax.scipy.sparse.linalg.cg(lambda v: gram @ v, b, tol=1e-14, maxiter=40)[0]


def by_hand(gram, b):
    """A solver with a diagnosis beside its solution, and functions that are given casts."""
    solve = lambda _, b: (jnp.linalg.inv(gram).astype(b.dtype) @ b, jnp.max(b))
    matvec = lambda v: gram @ v
    return lax.custom_linear_solve(matvec, b, solve, transpose_solve=solve, has_aux=True)[0]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("solver", [by_lu, by_cg, by_hand])
def test_the_functions_of_a_solver_in_an_island_run_in_float64(solver):
    def fn(x, b):
        with jax.named_scope("chol"):  # of condition 1e5
            gram = x @ x.T + 1e-4 * jnp.eye(6, dtype=x.dtype)
            solution = solver(gram, b) - b
        return jnp.sum(solution**2)

    mixed, args = autocast(fn, policy=ISLAND, params=()), (X[:, :3], X[0])
    solves = find(trace(mixed, *args), "custom_linear_solve")
    held = [body.jaxpr for eqn in solves for body in eqn.params["jaxprs"] if body is not None]
    variables = [v for body in (*solves, *held) for v in (*body.invars, *body.outvars)]
    assert {v.aval.dtype for v in variables if v.aval.dtype.kind == "f"} == {DOUBLE}
    gradient = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1)))
    exact, right = gradient(fn)(*(x.astype(np.float64) for x in args))
    value, found = gradient(mixed)(*args)
    np.testing.assert_allclose(value, exact, rtol=1e-6)
    for mine, other in zip(found, right, strict=True):
        assert mine.dtype == SINGLE
        np.testing.assert_allclose(mine, other, atol=1e-6 * np.abs(other).max())


def test_a_mark_in_the_code_is_an_island_too():
    def fn(x):
        with compute_precision("float64"):
            return jnp.exp(x @ x)

    found = dtypes(autocast(fn, policy=BF16), X)
    assert found["dot_general"] == found["exp"] == {DOUBLE}


def test_what_has_no_float64_form_is_reported():
    def fn(x):
        with jax.named_scope("chol"):
            return lax.reduce_precision(jnp.exp(x), 8, 10)

    rows = explain(fn, X, policy=ISLAND).rows
    assert [(r.primitive, r.operands, r.reason) for r in rows] == [
        ("exp", ("float64",), "SCOPE"),
        ("reduce_precision", ("float32",), "KEEP"),
    ]
    assert rows[1].cause == "no float64 form of reduce_precision"


def test_an_inner_scope_leaves_the_island():
    policy = ISLAND.with_scopes({"*/cheap": "bfloat16"})

    def fn(x):
        with jax.named_scope("chol"):
            y = jnp.exp(x)
            with jax.named_scope("cheap"):
                return y @ x

    found = dtypes(autocast(fn, policy=policy, params=()), X)
    assert found["exp"] == {DOUBLE}
    assert found["dot_general"] == {np.dtype("bfloat16")}


def test_without_x64_an_island_is_refused():
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match=r"scope '.chol.' asks for float64, .* is off"):
            autocast(logdet, policy=ISLAND)(X)
        # A policy may be written and read where no program runs.
        assert Policy("bfloat16", scopes=(("*chol*", "float64"),)) == ISLAND
