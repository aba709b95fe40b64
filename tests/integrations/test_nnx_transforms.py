"""How a call gets at a module of Flax NNX, and NNX's transformations around and inside of it.

In each, state, results and gradients are as without `autocast`.
"""

import functools

import numpy as np
import pytest
from flax import nnx

from tests.support.jaxprs import dot_dtypes
from tests.support.nnx_models import (
    HALF,
    Net,
    X,
    assert_same_state,
    bf16,
    jaxpr_of,
    loss_fn,
    new_net,
)
from tests.support.numerics import assert_trees_near

XS = np.stack([X, 2 * X, -X])


def plain(fn):
    return fn


def scanned(cast, net, xs):
    step = lambda net, x: (net, cast(loss_fn)(net, x))
    return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(net, xs)[1]


def in_fori(cast, net):
    body = lambda _, carry: (carry[0], carry[1] + cast(loss_fn)(*carry))
    return nnx.fori_loop(0, 2, body, (net, X))[1]


def branched(cast, net, x):
    return nnx.cond(x[0, 0] < 9, cast(lambda m, x: m(x)), lambda m, x: x[:, :3], net, x)


def of_kernels(cast):
    argnums = nnx.DiffState(0, nnx.PathContains("kernel"))
    return nnx.grad(cast(loss_fn), argnums=argnums)


# Each calls the module once.
CALLS = {
    "argument": lambda cast, net: cast(lambda m, x: m(x))(net, X),
    "module": lambda cast, net: cast(net)(X),
    "method": lambda cast, net: cast(net.__call__)(X),
    "twice": lambda cast, net: cast(lambda head, a, b, x: a(x))(net.head, net, net, X),
    "cond": lambda cast, net: branched(cast, net, X),
    "value_and_grad": lambda cast, net: nnx.value_and_grad(cast(loss_fn))(net, X),
    "autocast of value_and_grad": lambda cast, net: cast(nnx.value_and_grad(loss_fn))(net, X),
    "grad of some variables": lambda cast, net: of_kernels(cast)(net, X),
    "jit around value_and_grad": lambda cast, net: nnx.jit(nnx.value_and_grad(cast(loss_fn)))(
        net, X
    ),
    "remat": lambda cast, net: nnx.grad(nnx.remat(cast(loss_fn)))(net, X),
}
LOOPS = {
    "scan": lambda cast, net: scanned(cast, net, XS),
    "autocast of scan": lambda cast, net: cast(functools.partial(scanned, plain))(net, XS),
    "fori_loop": in_fori,
}
PROGRAMS = CALLS | LOOPS


@functools.cache
def results():
    """What each program returns and leaves in its module, in 16 bits and in float32."""
    programs = {(n, c): functools.partial(p, c) for n, p in PROGRAMS.items() for c in (bf16, plain)}
    nets = [new_net() for _ in programs]
    run = nnx.jit(lambda nets: [p(net) for p, net in zip(programs.values(), nets, strict=True)])
    return dict(zip(programs, zip(run(nets), nets, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("jit_caches")
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_and_results_are_as_without_autocast(name):
    dots = dot_dtypes(jaxpr_of(functools.partial(PROGRAMS[name], bf16), new_net()))
    assert {dot[0] for dot in dots} == {"bfloat16"}
    (got, net), (want, exact) = results()[name, bf16], results()[name, plain]
    assert_trees_near(got, want, 3 * HALF["bfloat16"])  # with one dropout mask
    assert_same_state(net, exact, (1 if name in CALLS else 3) * HALF["bfloat16"])
    assert (
        net.calls[...] == net.dropout.rngs.count[...] == (1 if name in CALLS else exact.calls[...])
    )
    assert (net.norm.mean[...] != 0).all()
    assert net.tied is net.head


@pytest.mark.usefixtures("jit_caches")
def test_vmap_over_models():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Net(rngs)

    def run(cast):
        nets = make(nnx.Rngs(0))
        return nets, nnx.jit(nnx.vmap(cast(lambda m, x: m(x)), in_axes=(0, 0)))(nets, XS)

    (got, out), (want, expected) = run(bf16), run(plain)
    assert_trees_near(out, expected, 3 * HALF["bfloat16"])
    assert_same_state(got, want, 3 * HALF["bfloat16"])
    assert (got.calls[...] == 1).all()
