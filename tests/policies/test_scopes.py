"""Regions with a precision of their own: marks in the code, and patterns over scope names."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, autocast, compute_precision, full_precision
from jmp_autocast.interpreters.compat import scope_names
from tests.support.jaxprs import DOTS, dot_dtypes, dtypes, equations, find, trace
from tests.support.own_rules import in_custom_jvp, in_custom_vjp, in_custom_vmap

LOW, FULL = "bfloat16", "float32"
bf16 = functools.partial(autocast, policy=jnp.bfloat16)

# Every dot of the region has a dimension 5, every other one a dimension 7.
PARAMS = {
    "outside": np.full((6, 7), 0.25, np.float32),
    "region": np.full((6, 5), 0.5, np.float32),
}
X = np.ones((6, 6), np.float32)


def dots_by_size(jaxpr):
    """The dtypes of the operands of the dots in the region (5) and outside (7)."""
    found = {5: set(), 7: set()}
    for eqn in find(jaxpr, *DOTS):
        shapes = [d for v in (*eqn.invars, *eqn.outvars) for d in v.aval.shape]
        (size,) = {5, 7} & set(shapes)
        found[size] |= set(dtypes(eqn.invars))
    return found


def layer(w, x):
    return jnp.tanh(x @ w)


def scanned(f):
    # The carry changes: what is the same in each step, JAX moves out of the loop and its scopes.
    return lambda w, x: lax.scan(lambda c, _: (2 * c, f(w, c)), x, None, length=2)[1].sum(0)


def branching(f):
    return lambda w, x: lax.cond(x[0, 0] > 0, f, lambda w, x: 2.0 * f(w, x), w, x)


STRUCTURES = {
    "plain": lambda f: f,
    "jit": lambda f: jax.jit(lambda w, x: f(w, x)),
    "remat": jax.checkpoint,
    "scan": scanned,
    "cond": branching,
    "custom_jvp": in_custom_jvp,
    "custom_vjp": in_custom_vjp,
    "jit_of_scan_of_remat": lambda f: jax.jit(scanned(jax.checkpoint(f))),
}


def in_full_precision(f):
    def region(w, x):
        with full_precision():
            return f(w, x)

    return region


TRANSFORMS = {
    "forward": lambda f: bf16(f),
    "grad_outside": lambda f: jax.grad(bf16(f)),
    "grad_inside": lambda f: bf16(jax.grad(f)),
    "jvp": lambda f: lambda p, x: jax.jvp(lambda p: bf16(f)(p, x), (p,), (p,)),
    "vmap_outside": lambda f: lambda p, x: jax.vmap(bf16(f), (None, 0))(p, x[:, None]),
    "vmap_inside": lambda f: lambda p, x: bf16(jax.vmap(f, (None, 0)))(p, x[:, None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_a_full_precision_region(structure, around, transform):
    region = in_full_precision(structure(layer)) if around else structure(in_full_precision(layer))

    def model(params, x):
        outside = structure(layer)(params["outside"], x)
        return jnp.sum(outside) + jnp.sum(region(params["region"], x))

    jaxpr = trace(transform(model), PARAMS, X)
    assert dots_by_size(jaxpr) == {5: {FULL}, 7: {LOW}}


def test_equations_of_the_region_in_a_backward_pass_are_float32():
    def model(params, x):
        h = layer(params["outside"], x) @ params["outside"].T
        return jnp.sum(jnp.sin(in_full_precision(lambda w, x: jnp.cos(x @ w))(params["region"], h)))

    jaxpr = trace(jax.grad(bf16(model)), PARAMS, X)
    assert dots_by_size(jaxpr) == {5: {FULL}, 7: {LOW}}
    marked = [e for e in equations(jaxpr) if "autocast[full_precision]" in scope_names(e)]
    names = {e.primitive.name for e in marked}
    assert {"dot_general", "cos", "sin", "mul", "neg"} <= names  # of both passes
    for eqn in marked:
        if eqn.primitive.name != "convert_element_type":
            assert LOW not in dtypes((*eqn.invars, *eqn.outvars)), eqn


HALF = functools.partial(compute_precision, "float16")
BRAIN = functools.partial(compute_precision, jnp.bfloat16)
SINGLE = functools.partial(compute_precision, np.float32)


@pytest.mark.parametrize(("region", "expected"), [(HALF, "float16"), (full_precision, FULL)])
@pytest.mark.parametrize(
    ("structure", "transform"),
    [
        (in_custom_jvp, "grad_outside"),
        (in_custom_jvp, "jvp"),
        (in_custom_vjp, "grad_outside"),
        (in_custom_vmap, "vmap_outside"),
    ],
)
def test_a_region_around_a_rule_of_the_users_own(structure, transform, region, expected):
    """JAX asks for the rule later, and its scopes are not those of the region."""
    inner = structure(layer)

    def model(params, x):
        h = layer(params["outside"], x) @ params["outside"].T
        with region():
            return jnp.sum(inner(params["region"], h))

    jaxpr = trace(TRANSFORMS[transform](model), PARAMS, X)
    assert dots_by_size(jaxpr) == {5: {expected}, 7: {LOW}}


@pytest.mark.parametrize(
    ("scopes", "expected"),
    [
        ((), LOW),
        ((HALF,), "float16"),
        ((SINGLE,), FULL),
        ((full_precision, HALF), "float16"),
        ((HALF, full_precision), FULL),
        ((HALF, full_precision, BRAIN), LOW),
        ((full_precision, full_precision), FULL),
    ],
)
@pytest.mark.parametrize("split", [False, True], ids=["one_jaxpr", "a_jit_between"])
def test_the_innermost_region_wins(scopes, expected, split):
    def enter(rest, x):
        if not rest:
            return x @ x
        with rest[0]():
            inner = functools.partial(enter, rest[1:])
            return (jax.jit(inner) if split else inner)(x)

    jaxpr = trace(bf16(functools.partial(enter, scopes)), np.ones((8, 8), np.float32))
    assert dot_dtypes(jaxpr)[0][:2] == (expected, expected)


def test_one_jitted_function_in_two_regions():
    """JAX traces it once: its jaxpr is shared, its plans must not be."""
    shared = jax.jit(layer)

    def model(params, x):
        low = shared(params["a"], x)
        with full_precision():
            full = shared(params["b"], x)
        with compute_precision(jnp.float16):
            half = shared(params["c"], x)
        return jnp.sum(low) + jnp.sum(full) + jnp.sum(half) + jnp.sum(shared(params["a"], x))

    params = dict.fromkeys("abc", PARAMS["outside"])
    forward = [LOW, FULL, "float16", LOW]
    assert [d[0] for d in dot_dtypes(trace(bf16(model), params, X))] == forward
    both = [d[0] for d in dot_dtypes(trace(jax.grad(bf16(model)), params, X))]
    assert sorted(both) == sorted(2 * forward)


@pytest.mark.parametrize("region", [full_precision, HALF], ids=["full", "float16"])
def test_outside_autocast_a_region_changes_nothing(region):
    def marked(params, x):
        with region():
            return jnp.sum(layer(params["outside"], x))

    plain = lambda params, x: jnp.sum(layer(params["outside"], x))
    for transform in (lambda f: f, jax.grad):
        assert str(trace(transform(marked), PARAMS, X)) == str(trace(transform(plain), PARAMS, X))


# --- patterns -------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="proj")(nn.gelu(nn.LayerNorm()(nn.Dense(8, name="up")(x))))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"layer_{i}")(x)
        return nn.Dense(3, name="head")(x)


# The products are those of layer_0/up, layer_0/proj, layer_1/up, layer_1/proj and head.
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({}, [LOW] * 5),
        ({"*/head": FULL}, [LOW] * 4 + [FULL]),
        ({"*/proj": FULL}, [LOW, FULL, LOW, FULL, LOW]),
        ({"*/layer_0": FULL}, [FULL, FULL, LOW, LOW, LOW]),
        ({"*layer_1/proj": FULL}, [LOW] * 3 + [FULL, LOW]),
        ({"*/layer_?": FULL, "*/proj": "float16"}, [FULL, "float16", FULL, "float16", LOW]),
        ({"*": FULL}, [FULL] * 5),
        ({"*": FULL, "*/head": LOW}, [FULL] * 4 + [LOW]),
        ({"*/head": FULL, "*/h*": LOW}, [LOW] * 5),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_patterns_over_module_paths(patterns, expected):
    policy, x = BF16, np.ones((2, 8), np.float32)
    for pattern, dtype in patterns.items():
        policy = policy.with_rules({"*": dtype}, scope=pattern)
    variables = jax.eval_shape(Net().init, jax.random.key(0), x)
    jaxpr = trace(autocast(Net().apply, policy=policy), variables, x)
    assert [d[0] for d in dot_dtypes(jaxpr)] == expected


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            BF16.with_rules({"*": "float32"}, scope="*/haed"),
            r"matches '\*/haed'.*Did you mean 'head'",
        ),
        (BF16.with_rules({"tanh": "FP32"}, scope="q7q7"), "'q7q7'.*Its scopes are head, net"),
        (BF16.with_rules({"*": "float32"}, scope="*/head").with_rules({"*": "float32"}), None),
    ],
)
def test_a_pattern_that_matches_nothing_warns(policy, message):
    def model(x):
        with jax.named_scope("net"), jax.named_scope("head"):
            return jnp.tanh(x @ x)

    with pytest.warns(match=message) if message else warnings.catch_warnings(action="error"):
        trace(autocast(model, policy=policy), np.ones((8, 8), np.float32))


def test_a_star_covers_what_stands_in_no_scope():
    def model(x):
        with jax.named_scope("net"):
            y = x @ x
        return x @ x, jax.jit(jnp.dot)(y, y)

    policies = (
        BF16.with_rules({"*": "float32"}),
        BF16.with_rules({"dot_general": "FP32"}, scope="*"),
    )
    for policy in policies:
        jaxpr = trace(autocast(model, policy=policy), np.ones((8, 8), np.float32))
        assert [d[0] for d in dot_dtypes(jaxpr)] == [FULL] * 3
    # Whatever else matches lies deeper, also if it is given first.
    policy = BF16.with_rules({"*": "bfloat16"}, scope="net").with_rules({"*": "float32"})
    jaxpr = trace(autocast(model, policy=policy), np.ones((8, 8), np.float32))
    assert [d[0] for d in dot_dtypes(jaxpr)] == [LOW, FULL, FULL]


def test_a_mark_in_the_code_and_a_pattern_count_alike():
    def model(x):
        with jax.named_scope("net"):
            with full_precision():
                inner_mark = x @ x
                with jax.named_scope("head"):
                    inner_pattern = x @ x
            return inner_mark, inner_pattern

    policy = BF16.with_rules({"*": "float16"}, scope="net").with_rules(
        {"*": "bfloat16"}, scope="*/head"
    )
    jaxpr = trace(autocast(model, policy=policy), np.ones((8, 8), np.float32))
    assert [d[0] for d in dot_dtypes(jaxpr)] == [FULL, LOW]
