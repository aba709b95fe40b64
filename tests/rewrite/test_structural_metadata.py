"""What is attached to a program's structure survives: parameters, effects, names, source lines."""

import functools
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.interpreters import mlir

from jmp_autocast import autocast
from jmp_autocast.interpreters.compat import name_stack, source_line
from jmp_autocast.interpreters.primitives.cached_bind import bind_cached
from tests.support.jaxprs import DOTS, casts, dot_dtypes, find, named, trace

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)  # not evenly spaced, as positions are


def dense(x):
    return jnp.tanh(x @ jnp.asarray(X))


def twins(fn, *args, derivative=lambda f: f):
    """The jaxprs of the plain function and of the autocast one."""
    half = autocast(fn, jnp.bfloat16)
    return trace(derivative(fn), *args), trace(derivative(half), *args)


def donating(x):
    return jax.jit(dense, donate_argnums=0, keep_unused=True)(x)


@jax.jit
def a_name_of_its_own(x):
    return dense(x)


def scans(x):
    x, _ = lax.scan(lambda h, _: (dense(h), None), x, None, length=6, unroll=2)
    _, ys = lax.scan(lambda h, row: (h, dense(row[None])), x, x, reverse=True, unroll=True)
    return lax.scan(lambda h, y: (h + dense(y), None), ys[0], ys, _split_transpose=True)


SAVE_HIDDEN = jax.checkpoint_policies.save_only_these_names("hidden")


def remats(x):
    x = jax.checkpoint(dense, policy=SAVE_HIDDEN)(x)
    x = jax.checkpoint(dense, prevent_cse=False)(x)
    return jax.checkpoint(lambda x: checkpoint_name(dense(x), "hidden"))(x)


def branches(x):
    return lax.switch(jnp.argmax(x[0]), [dense, jnp.sin, lambda x: dense(dense(x))], x)


# What a rewrite must change: the jaxprs themselves, and the number of constants of a loop.
REBUILT = {"jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "branches", "ft_in", "num_consts"}
REBUILT |= {"cond_nconsts", "body_nconsts", "_split_transpose_ft_in"}


@pytest.mark.parametrize("derivative", [lambda f: f, jax.checkpoint], ids=["f", "checkpoint"])
@pytest.mark.parametrize(
    ("fn", "primitives"),
    [
        (donating, ["jit"]),
        (a_name_of_its_own, ["jit"]),
        (scans, ["scan"]),
        (remats, ["remat2", "remat_opt", "checkpoint", "name"]),
        (branches, ["cond"]),
        (lambda x: lax.while_loop(lambda x: jnp.sum(x) > 0, dense, x), ["while"]),
    ],
    ids=["donating", "name", "scan", "remat", "switch", "while"],
)
def test_parameters_survive(fn, primitives, derivative):
    plain, cast = (find(jaxpr, *primitives) for jaxpr in twins(fn, X, derivative=derivative))
    assert len(plain) == len(cast) > 0
    for before, after in zip(plain, cast, strict=True):
        assert before.params.keys() == after.params.keys()
        for name in before.params.keys() - REBUILT:
            assert before.params[name] == after.params[name], name


def blocks(policy):
    @functools.partial(jax.checkpoint, policy=policy)
    def block(x):
        hidden = checkpoint_name(jnp.sin(x @ X) @ X.T, "hidden")
        return jnp.sin(hidden) @ X

    return lambda x: jnp.sum(block(block(jnp.asarray(x))))


POLICIES = {
    "nothing": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": SAVE_HIDDEN,
    "any_but": jax.checkpoint_policies.save_anything_except_these_names("hidden"),
    "everything": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_remat_policy_saves_what_it_saved(policy):
    """The recomputed dots are those that the plain program recomputes."""
    jaxprs = twins(blocks(POLICIES[policy]), X, derivative=jax.grad)
    plain, cast = map(dot_dtypes, jaxprs)
    assert len(cast) == len(plain)
    assert {dtype for dot in cast for dtype in dot} == {"bfloat16"}
    assert len(cast) == 12 + {"nothing": 4, "names": 2}.get(policy, 0)


def test_dots_that_remat_saves_are_16_bit():
    def residuals(fn):
        return [
            r.dtype.name for r in jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(fn, x)[1], X))
        ]

    fn = blocks(POLICIES["dots"])
    plain, cast = residuals(fn), residuals(autocast(fn, jnp.bfloat16))
    assert plain.count("float32") == len(plain) == len(cast)
    assert cast.count("bfloat16") == 4  # two in each block; the others are the blocks' inputs


def effects(log):
    """Ordered effects of four kinds, one in a loop and one in a branch, around dots."""

    def fn(x):
        note = lambda tag, v: io_callback(
            lambda v: log.append((tag, v.dtype.name)), None, v, ordered=True
        )
        note("before", x @ x)
        body = lambda i, h: (note("loop", dense(h)[0, 0]), dense(h))[1]
        x = lax.fori_loop(0, 2, body, x)
        lax.cond(x[0, 0] < 2, lambda x: note("branch", x @ x), lambda x: None, x)
        jax.debug.callback(lambda v: log.append(("debug", v.dtype.name)), x @ x, ordered=True)
        jax.jit(lambda x: note("jit", x @ x))(x)
        return x

    return fn


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_ordered_effects_happen_in_order(compiled):
    log = []
    fn = autocast(effects(log), jnp.bfloat16)
    jax.block_until_ready((jax.jit(fn) if compiled else fn)(jnp.asarray(X)))
    jax.effects_barrier()
    assert {dtype for _, dtype in log} == {"float32"}
    tags = [tag for tag, _ in log]
    # JAX orders the effects of one kind: with SSE4.2 the debug callback comes after the last other.
    assert sorted(tags) == sorted(["before", "loop", "loop", "branch", "debug", "jit"])
    tags.remove("debug")
    assert tags == ["before", "loop", "loop", "branch", "jit"]


def test_effects_are_those_of_the_plain_program():
    plain, cast = twins(effects([]), X)
    assert cast.effects == plain.effects
    assert len(plain.effects) == 2
    names = ("io_callback", "debug_callback")
    assert [e.effects for e in find(cast, *names)] == [e.effects for e in find(plain, *names)]


def test_an_unused_effect_is_kept():
    log = []
    fn = autocast(lambda x: (jax.debug.callback(lambda: log.append(1)), x)[1])
    jax.jit(fn)(X)
    jax.effects_barrier()
    assert log == [1]


def scoped(x):
    with jax.named_scope("outer_scope"):
        x = dense(x)
        with jax.named_scope("inner_scope"):
            x = dense(x)
        x, _ = lax.scan(lambda h, _: (jax.named_call(dense, name="in_loop")(h), None), x, None, 2)
    return jnp.sum(x)


def operation_names(fn, *args):
    """Scopes of each dot in the lowered program, without autocast's mark."""
    text = jax.jit(fn).lower(*args).as_text(debug_info=True)
    names = re.findall(r'loc\("([^"]*dot_general)"', text)
    # The table of locations has no order that the program has.
    return sorted(n.replace("autocast[declared]/", "").replace("jvp()/", "") for n in names)


def test_name_stacks_reach_the_compiler():
    plain = operation_names(scoped, X)
    assert operation_names(autocast(scoped), X) == plain
    assert any("outer_scope/inner_scope" in name for name in plain)
    assert operation_names(autocast(jax.grad(scoped)), X) == operation_names(jax.grad(scoped), X)


def test_equal_products_are_lowered_once_and_keep_their_name_stacks(monkeypatch):
    """JAX caches the lowering of equal equations, and inlines it under each one's location."""

    def layers(w, x):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    lowered = []
    lower_fun = mlir.lower_fun
    monkeypatch.setattr(mlir, "lower_fun", lambda f, **k: lowered.append(f) or lower_fun(f, **k))
    names = operation_names(autocast(layers, jnp.bfloat16), X, X)
    assert [re.findall(r"layer_\d", name) for name in names] == [[f"layer_{i}"] for i in range(4)]
    # One for the layers, whose product is rounded, and one for the last.
    assert len(lowered) <= 2


def test_name_stacks_of_the_backward_pass():
    """JAX writes jvp and transpose around the first scope, which is autocast's mark here."""
    names = operation_names(jax.grad(autocast(scoped)), X)
    backward = [name for name in names if "transpose(" in name]
    assert any("outer_scope/inner_scope" in name for name in backward)


def test_a_moved_copy_stands_where_the_weight_is_moved():
    """It is made when it is first read, which may be in another layer."""

    def tied(w, x):
        with jax.named_scope("maker"):
            w = w.T
        with jax.named_scope("reader"):
            return x @ w

    jaxpr = trace(autocast(tied, params=0), X[:, :6], X[:3, :6])
    moved = [e for e in find(jaxpr, "transpose") if e.outvars[0].aval.dtype == jnp.bfloat16]
    cast = [e for e in casts(jaxpr, "float32", "bfloat16") if e.invars[0].aval.shape == (8, 6)]
    assert [name_stack(e).split("/")[1:] for e in (*moved, *cast)] == [["maker"], ["maker"]]


@pytest.mark.parametrize("derivative", [lambda f: f, jax.grad], ids=["f", "grad"])
def test_equations_point_at_the_same_source_lines(derivative):
    lines = [
        [source_line(e) for e in named(jaxpr, *DOTS, "tanh")]
        for jaxpr in twins(scoped, X, derivative=derivative)
    ]
    assert lines[0] == lines[1]
    assert all("test_structural_metadata.py" in line for line in lines[0])


def test_casts_point_at_the_line_that_needs_them():
    jaxpr = trace(autocast(dense), X)
    for eqn in (*casts(jaxpr, "float32", "float16"), *find(jaxpr, "source_view")):
        summary = source_line(eqn)
        assert "test_structural_metadata.py" in summary
        assert "(dense)" in summary


no_derivative_p = jax.extend.core.Primitive("no_derivative")
no_derivative_p.def_impl(lambda x: x)
no_derivative_p.def_abstract_eval(lambda x: x)


def the_line_to_blame(x):
    return jnp.sum(no_derivative_p.bind(x @ x))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["f", "jit", "remat"])
def test_an_error_after_tracing_names_the_users_line(wrap):
    """JAX differentiates the rewritten program, long after the user's function has returned."""
    # An exception holds tracers, which counts as a leak.
    with (
        pytest.raises(NotImplementedError, match="no_derivative") as info,
        jax.check_tracer_leaks(False),
    ):
        jax.grad(autocast(wrap(the_line_to_blame)))(X)
    assert "in the_line_to_blame" in "".join(traceback.format_exception(info.value))


def test_a_number_of_numpy_among_parameters_is_no_number_of_python():
    """They are equal, but not to the text of a jaxpr."""
    (eqn,) = jax.make_jaxpr(lambda x: jnp.sum(x, axis=1))(jnp.ones((2, 3))).eqns

    def bound(axis):
        params = {**eqn.params, "axes": (axis,)}
        jaxpr = jax.make_jaxpr(lambda x: bind_cached(eqn.primitive, [x], params))(jnp.ones((2, 3)))
        return type(jaxpr.eqns[0].params["axes"][0])

    assert [bound(np.int64(1)), bound(1)] == [np.int64, int]
