"""What is kept, what is computed again, and what never is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp_autocast import keep_less
from jmp_autocast.inspect.report.kept import kept_bytes
from jmp_autocast.interpreters.compat import body_of
from jmp_autocast.interpreters.keep import emit
from jmp_autocast.interpreters.keep.choice import as_choice
from jmp_autocast.interpreters.primitives.traits import BACKWARD
from jmp_autocast.policies import DEFAULT_RULES, STRUCTURAL
from tests.support.jaxprs import find, trace
from tests.support.numerics import relative_error

from .programs import LAYERS, WEIGHTS, X, scanned, unrolled

pytestmark = pytest.mark.usefixtures("jit_caches")


def kept_nbytes(f):
    leaves, tree = jax.tree.flatten((WEIGHTS, X))
    params = range(len(leaves) - 1)
    found = kept_bytes(lambda *xs: [f(*jax.tree.unflatten(tree, xs))], leaves, params)
    assert not found.error
    return found.nbytes


def cut_of(f, residuals="auto"):
    """What is kept in the one jaxpr of a program that is planned, or in its loop."""
    leaves, tree = jax.tree.flatten((WEIGHTS, X))
    closed = trace(lambda *xs: f(*jax.tree.unflatten(tree, xs)), *leaves)
    is_param, choice = [True] * (len(leaves) - 1) + [False], as_choice(residuals)
    cuts, original = [], emit.cut_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit, "cut_of", lambda *args: cuts.append(original(*args)) or cuts[-1])
        trace(lambda *xs: emit.run_planned(closed, is_param, choice, xs), *leaves)
    return cuts[-1]  # a loop is planned when the equations around it are emitted


@pytest.mark.parametrize("f", [scanned, unrolled])
def test_jax_keeps_what_the_cut_says(f):
    residuals = "recompute" if f is unrolled else "auto"
    said = cut_of(f, residuals).nbytes * (1 if f is unrolled else LAYERS)
    kept = kept_nbytes(keep_less(f, residuals=residuals))
    # What the program does behind the loop is not planned; the slices of weights are kept, too.
    assert said <= kept <= 1.2 * said
    assert kept < 0.5 * kept_nbytes(f)


def test_a_share_is_kept_to_with_less_computed_again():
    cuts = {share: cut_of(scanned, share) for share in (0, 0.5, 0.7, 1)}
    for share, cut in cuts.items():
        assert cut.nbytes <= max(share * cut.declared_nbytes, cuts[0].nbytes)
    again = [sum(v.nbytes for v in cut.recomputed) for cut in cuts.values()]
    assert again == sorted(again, reverse=True)
    assert again[0] > again[1] > again[2] > 0 == again[3]


def activated(weights, x):
    """Each stream is read by the product, through an exponential, and again behind it."""
    for i in range(LAYERS):
        x = jnp.tanh(x + jnp.exp(x) @ weights["q"][i])
    return x.sum()


def test_a_stream_is_made_again_before_the_contraction_from_what_is_kept():
    found = cut_of(activated, "recompute")
    kept = [v.producer.eqn.primitive.name for v in found.kept if v.producer and v.nbytes]
    assert kept.count("add") == LAYERS
    assert "tanh" not in kept
    assert found.nbytes == LAYERS * X.nbytes
    plain, again = (
        jax.jit(jax.grad(f))(WEIGHTS, X)["q"]
        for f in (activated, keep_less(activated, residuals="recompute"))
    )
    assert relative_error(again, plain) < 1e-6


@jax.custom_vjp
def own_rule(x):
    return jnp.sin(x)


own_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def own_contraction(x):
    return x * 2


own_contraction.defjvp(lambda xs, ts: (xs[0] * 2, ts[0] * (xs[0] @ xs[0].T)[:1]))


def printed(x):
    jax.debug.print("{}", x[0, 0])
    return x


# Each is between two elementwise steps whose operands would all be computed again.
NEVER = {
    "random_bits": lambda x: x * jax.random.uniform(jax.random.key(0), x.shape),
    "gather": lambda x: x[jnp.array([0, 1] * 4)],
    "sort": lambda x: jnp.sort(x, axis=0),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "dot_general": lambda x: x @ x.T,
    "debug_callback": printed,
    "debug_print": printed,
    "custom_vjp_call": own_rule,
    "custom_jvp_call": own_contraction,
    "name": lambda x: checkpoint_name(x, "mine"),
    "while": lambda x: x + lax.while_loop(lambda y: y < 9.0, jnp.exp, lax.stop_gradient(x.sum())),
}


@pytest.mark.parametrize("name", NEVER)
def test_never_in_an_segment(name):
    def layer(x, w):
        return jnp.exp(NEVER[name](jnp.exp(x @ w["q"])))

    found = trace(keep_less(lambda w, x: scanned(w, x, layer)), WEIGHTS, X)
    segments = find(found, "remat2", "checkpoint")
    assert segments
    inside = [eqn for segment in segments for eqn in find(segment.params["jaxpr"], name)]
    if name == "name":
        inside = [eqn for eqn in inside if eqn.params["name"] == "mine"]
    if name == "dot_general":
        # A contraction may read what is made again; it is not made again itself.
        def count(f):
            return len(find(trace(jax.grad(f), WEIGHTS, X), "dot_general"))

        plain = lambda w, x: scanned(w, x, layer)
        assert count(keep_less(plain)) == count(plain)
    else:
        assert not inside


def test_a_cheap_rule_of_jax_is_computed_again():
    """`jax.nn.relu` has a rule of its own, of which only cheap steps are made."""

    def layer(x, w):
        return jax.nn.relu(jnp.exp(x @ w["q"]))

    found = trace(keep_less(lambda w, x: scanned(w, x, layer)), WEIGHTS, X)
    segments = find(found, "remat2", "checkpoint")
    assert [eqn for segment in segments for eqn in find(segment.params["jaxpr"], "custom_jvp_call")]


@pytest.mark.parametrize(
    ("f", "where"),
    [
        (
            lambda w, x: scanned(w, x, jax.checkpoint(lambda x, w: jnp.exp(x @ w["q"]))),
            "a checkpoint",
        ),
        (lambda w, x: lax.fori_loop(0, x.shape[0], lambda i, x: jnp.exp(jnp.sin(x)), x).sum(), ""),
        (unrolled, "at top level"),
    ],
)
def test_left_alone(f, where):
    """Nothing changes in a user's checkpoint, and at top level; nor where there is no loop."""
    plain, found = (
        len(find(trace(g, WEIGHTS, X), "remat2", "checkpoint")) for g in (f, keep_less(f))
    )
    assert found == plain + (where == "")


def test_excluded_scopes():
    def layer(x, w):
        with jax.named_scope("head"):
            x = jnp.exp(jnp.sin(x @ w["q"]))
        return x

    def count(**options):
        f = keep_less(lambda w, x: scanned(w, x, layer), **options)
        return len(find(trace(f, WEIGHTS, X), "remat2", "checkpoint"))

    assert (count(), count(keep_scopes=("*head",)), count(keep_scopes=("tail",))) == (1, 0, 1)


def test_values_that_a_policy_names_are_kept():
    """The user's policy, outside, finds the names that the program has."""

    def layer(x, w):
        return jnp.exp(checkpoint_name(jnp.exp(x @ w["q"]), "mine"))

    f = keep_less(lambda w, x: scanned(w, x, layer))
    policy = jax.checkpoint_policies.save_only_these_names("mine")
    everything = kept_nbytes(jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable))
    assert kept_nbytes(jax.checkpoint(f, policy=policy)) > everything


# --- what is known of primitives ------------------------------------------------------------


def test_every_row_is_of_a_primitive():
    assert set(BACKWARD) <= set(DEFAULT_RULES) | STRUCTURAL


A, B = jnp.full((2, 2), 0.25), jnp.full((2, 2), 0.5)
UNARY = {
    "neg": jnp.negative,
    "reshape": lambda x: x.reshape(4),
    "transpose": lambda x: x.T,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (3, 2, 2)),
    "reduce_sum": lambda x: x.sum(0),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 1, 0)] * 2),
    "slice": lambda x: x[:1],
    "rev": lambda x: x[::-1],
    "cumsum": lax.cumsum,
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "floor": jnp.floor,
    "sign": jnp.sign,
    "stop_gradient": lax.stop_gradient,
    "optimization_barrier": lax.optimization_barrier,
}


@pytest.mark.parametrize("name", UNARY)
def test_a_derivative_reads_nothing_where_the_table_says_so(name):
    jaxpr = trace(UNARY[name], A)
    assert [e.primitive.name for e in body_of(jaxpr).eqns if e.primitive.name == name]
    assert BACKWARD[name] & {"linear", "flat"}
    kept = jax.tree.leaves(jax.vjp(UNARY[name], A)[1])
    assert not [x for x in kept if x.shape == A.shape and jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.parametrize("name", ["mul", "dot_general"])
def test_the_derivative_of_a_product_reads_the_other_factor(name):
    product = {"mul": jnp.multiply, "dot_general": jnp.matmul}[name]
    assert "bilinear" in BACKWARD[name]
    for f in (lambda x: product(x, B), lambda x: product(B, x)):
        kept = [x for x in jax.tree.leaves(jax.vjp(f, A)[1]) if x.shape == A.shape]
        assert kept
        assert all((x == B).all() for x in kept)
