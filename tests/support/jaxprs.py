"""Reading jaxprs: every equation of a program, inside everything, and the dtypes of its dots."""

from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from jmp_autocast.interpreters.rewrite import rewriter

DOTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def flat_emission():
    """A context in which each equation is bound by itself, however often its line recurs."""
    flat = lambda plan, *_: (plan.jaxpr, plan.equations)
    return mock.patch.object(rewriter, "repeated_windows", flat)


def open_jaxpr(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxprs(eqn):
    """The jaxprs that an equation holds, wherever they are in its parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(open_jaxpr(item), "eqns"):
                yield item


def equations(jaxpr, whole=()):
    """Every equation of a jaxpr, those inside others included, but for those of ``whole``."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        if eqn.primitive.name not in whole:
            for inner in inner_jaxprs(eqn):
                yield from equations(inner, whole)


def named(jaxpr, *names):
    """The equations of the given primitives that have a place in the program of their own.

    What an accumulating contraction holds is traced once for all that are alike: it stands for it.
    """
    names = {*names, "accumulate"} if {*names} & {*DOTS} else {*names}
    return [e for e in equations(jaxpr, whole=["accumulate"]) if e.primitive.name in names]


def trace(fn, *args, **kwargs):
    """`jax.make_jaxpr`, not from its cache."""
    return jax.make_jaxpr(lambda *a, **k: fn(*a, **k))(*args, **kwargs)


def find(jaxpr, *names):
    """The equations of the given primitives."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in names]


def dtypes(atoms):
    return tuple(a.aval.dtype.name for a in atoms)


def floats_of(jaxpr):
    """The float dtypes that the operands of each primitive have."""
    found = {}
    for eqn in equations(jaxpr):
        floats = {v.aval.dtype for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)}
        found.setdefault(eqn.primitive.name, set()).update(floats)
    return found


def dot_dtypes(jaxpr):
    """(operand, operand, result) dtypes of each matmul and convolution."""
    return [(*dtypes(eqn.invars[:2]), eqn.outvars[0].aval.dtype.name) for eqn in find(jaxpr, *DOTS)]


def assert_dots_run_in(dtype, jaxpr):
    """Asserts that there are dots and that all read both operands in ``dtype``."""
    found = dot_dtypes(jaxpr)
    assert found, "no dot in the program"
    assert all(lhs == rhs == dtype for lhs, rhs, _ in found), found


def casts(jaxpr, source, target):
    """The ``convert_element_type`` equations from one dtype to another."""
    return [
        eqn
        for eqn in find(jaxpr, "convert_element_type")
        if eqn.invars[0].aval.dtype == source and eqn.outvars[0].aval.dtype == target
    ]


def through_a_dot(x):
    """The values of ``x``, computed by a dot: under autocast a computed value in 16 bits."""
    # The sum of 8 eighths is exact.
    rows = lax.broadcast_in_dim(x.reshape(-1), (x.size, 8), (0,))
    return lax.dot(rows, lax.full((8, 1), 0.125, x.dtype)).reshape(x.shape)
