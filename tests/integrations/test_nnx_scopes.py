"""Autocast of functions of Flax NNX modules: the scopes that calls of modules get."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_autocast import BF16
from jmp_autocast.integrations.nnx import autocast
from jmp_autocast.interpreters.compat import scope_names
from tests.support.jaxprs import dot_dtypes, named
from tests.support.nnx_models import (
    Block,
    Tower,
    X,
    bf16,
    jaxpr_of,
    loss_fn,
    scanned,
    tower,
)
from tests.support.threads import at_once


def scopes(jaxpr):
    """The scopes of the matmuls, norms and activations."""
    found = named(jaxpr, "dot_general", "rsqrt", "tanh")
    paths = [[name for name in scope_names(eqn) if "autocast" not in name] for eqn in found]
    return {"/".join(path) for path in paths}


TOWER_SCOPES = {
    "Tower/out/Linear",
    *(
        f"Tower/blocks/{i}/Block{inner}"
        for i in (0, 1)
        for inner in ("", "/norm_in/LayerNorm", "/dense/Linear", "/norm_out/LayerNorm")
    ),
}

SCOPED = {
    "function": bf16(loss_fn),
    "module": lambda net, x: bf16(net)(x),
    "keyword": lambda net, x: bf16(lambda *, net, x: net(x))(net=net, x=x),
    "grad": nnx.grad(bf16(loss_fn)),
    "inside grad": bf16(nnx.grad(loss_fn)),
    "inside jit": bf16(nnx.jit(loss_fn)),
    "inside remat": bf16(nnx.remat(loss_fn)),
    "remat of a class": bf16(lambda net, x: nnx.remat(Tower.__call__)(net, x)),
    "nested": bf16(lambda net, x: bf16(loss_fn)(net, x)),
}


@pytest.mark.parametrize("fn", SCOPED.values(), ids=SCOPED)
def test_scopes_name_attributes_and_classes(fn):
    assert scopes(jaxpr_of(fn, tower(), X)) == TOWER_SCOPES


def test_scopes_are_there_after_a_trace_without():
    jitted = nnx.jit(loss_fn)
    with jax.check_tracer_leaks(False):  # which turns the caches of jit off
        assert scopes(jaxpr_of(jitted, tower(), X)) == {""}
        assert scopes(jaxpr_of(bf16(jitted), tower(), X)) == TOWER_SCOPES
        assert scopes(jaxpr_of(jitted, tower(), X)) == {""}


def test_scopes_in_a_scan():
    found = scopes(jaxpr_of(bf16(loss_fn), scanned(), X))
    assert {"layers/Block/norm_in/LayerNorm", "layers/Block/norm_out/LayerNorm"} <= found


@pytest.mark.parametrize(
    ("pattern", "low"),
    [
        ("*/Linear", 0),
        ("*/dense", 1),
        ("Tower/out", 2),
        ("*/blocks", 1),
        ("*/other", 3),
    ],
)
@pytest.mark.filterwarnings("ignore:No equation of")  # a pattern that matches nothing
def test_policies_find_scopes(pattern, low):
    policy = BF16.with_rules({"*": "float32"}, scope=pattern)
    forward = dot_dtypes(jaxpr_of(autocast(loss_fn, policy=policy), tower(), X))
    assert [lhs for lhs, _, _ in forward].count("bfloat16") == low
    inside = autocast(nnx.jit(loss_fn), policy=policy)
    step = dot_dtypes(jaxpr_of(nnx.grad(inside), tower(), X))
    assert [lhs for lhs, _, _ in step].count("bfloat16") == 3 * low  # three dots per layer


class Tied(nnx.Module):
    """A head that is a method of the embedding; a mixer whose method calls another of its own."""

    def __init__(self):
        self.embed, self.mixer = nnx.Embed(8, 8, rngs=nnx.Rngs(0)), Mixer()

    def logits(self, tokens):
        return self.embed.attend(self.mixer.mix(self.embed(tokens)))


class Mixer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((8, 8)))

    def mix(self, x):
        return jnp.tanh(self._product(x))

    def _product(self, x):
        return x @ self.kernel[...]


MIXED, HEAD = "Tied/logits/mixer/Mixer/mix", "Tied/logits/embed/Embed/attend"


@pytest.mark.parametrize(
    "fn",
    [lambda net, t: net.logits(t), nnx.jit(lambda net, t: net.logits(t))],
    ids=["plain", "jit"],
)
def test_methods_have_scopes(fn):
    assert scopes(jaxpr_of(bf16(fn), Tied(), jnp.zeros(3, int))) == {MIXED, HEAD}
    assert "method" not in Tied.logits.__qualname__  # the class is as it was


# --- modules are the kind of tree that they are outside ---------------------------------------

PRETRAINED = Tower(nnx.Rngs(1))
LAYERS = nnx.prefix(scanned().layers, {nnx.Param: 0, ...: None}, graph=False)
TREES = {"graph": False, "graph_updates": False}


def decayed(model, x):
    far = jax.tree.map(lambda p, q: jnp.sum((p - q) ** 2), model, PRETRAINED)
    return model(x).sum() + sum(jax.tree.leaves(far))


def same_tree(model, x):
    assert jax.tree.structure(model) == jax.tree.structure(PRETRAINED)
    assert nnx.split(model)[0] == nnx.split(PRETRAINED)[0]
    return model(x)


def in_a_scan(model, x):
    step = nnx.scan(lambda m, h: (m(h), None), in_axes=(LAYERS, nnx.Carry), **TREES)
    return step(model.layers, x)[0]


def grown(model, x):
    """A new attribute leaves the module its path."""
    model.out.scale = nnx.Param(jnp.ones(()))
    return model(x) * model.out.scale


OF_LAYERS = {f"layers/Block{x}" for x in ("", "/norm_in/LayerNorm", "/norm_out/LayerNorm")}
OUTSIDE = [
    (decayed, tower, TOWER_SCOPES),
    (same_tree, tower, TOWER_SCOPES),
    (grown, tower, TOWER_SCOPES),
    (in_a_scan, scanned, OF_LAYERS),
]


@pytest.mark.parametrize(
    ("fn", "model", "names"), OUTSIDE, ids=lambda x: getattr(x, "__name__", "")
)
def test_modules_meet_modules_from_outside(fn, model, names):
    model = nnx.clone(model())
    want = fn(nnx.clone(model), X)
    np.testing.assert_allclose(bf16(fn)(nnx.clone(model), X), want, rtol=0.02, atol=0.02)
    jaxpr = jaxpr_of(bf16(fn), model, X)
    assert "bfloat16" in str(dot_dtypes(jaxpr))
    assert names <= scopes(jaxpr)


def test_super_calls_methods_and_new_modules():
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Model(nnx.Module):
        def __init__(self):
            self.inner = Scaled(8, 8, rngs=nnx.Rngs(0))
            self.outer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def encode(self, x):
            return nnx.Linear(8, 8, rngs=nnx.Rngs(0))(self.outer(self.inner(x)))

    jaxpr = jaxpr_of(bf16(lambda m, x: m.encode(x)), Model(), X)
    # What is made inside has no attribute, only a class.
    inside = ("inner/Scaled", "outer/Linear", "Linear")
    assert scopes(jaxpr) == {f"Model/encode/{name}" for name in inside}


def test_classes_are_as_before_also_after_an_error():
    calls = {cls: vars(cls)["__call__"] for cls in (Tower, Block, nnx.Linear, nnx.LayerNorm)}

    def fail(net, x):
        assert vars(Tower)["__call__"] is not calls[Tower]
        net(x)
        raise RuntimeError("stop")

    net = nnx.clone(tower())
    with pytest.raises(RuntimeError, match="stop"):
        bf16(fail)(net, X)
    jaxpr_of(bf16(loss_fn), net, X)
    assert calls == {cls: vars(cls)["__call__"] for cls in calls}
    assert nnx.graphdef(net) == nnx.graphdef(tower())


def test_threads_trace_at_once():
    """Overlapping traces name their own modules only, and the last one restores the classes."""
    original = vars(Block)["__call__"]
    barrier = threading.Barrier(3, timeout=60)

    def meet(net, x):
        barrier.wait()
        out = net(x)
        barrier.wait()
        return out

    tower()
    jobs = {"first": bf16(meet), "second": bf16(meet), "plain": meet}
    found = at_once(
        {name: lambda fn=fn: scopes(jaxpr_of(fn, tower(), X)) for name, fn in jobs.items()}
    )
    assert found == {"first": TOWER_SCOPES, "second": TOWER_SCOPES, "plain": {""}}
    assert vars(Block)["__call__"] is original
