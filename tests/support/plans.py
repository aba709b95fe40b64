"""Plans of small functions, as the planner makes them."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_autocast import BF16
from jmp_autocast.interpreters import Planner, Request, Source, ValueState
from jmp_autocast.interpreters.after.computed_outputs import computed_requests
from jmp_autocast.interpreters.plan.avals import float_dtype
from jmp_autocast.interpreters.plan.marks import GIVEN, PARAMETER
from jmp_autocast.interpreters.plan.needs import Need

from .jaxprs import trace

LOW, FULL = np.dtype(jnp.bfloat16), np.dtype("float32")
F16 = np.dtype("float16")
LOWEST = float(np.finfo(np.float32).min)
DENORMAL = 1e-41  # 0 in bfloat16


def plan_of(
    fn, *args, policy=BF16, leaves=(), wanted=None, computed=False, consumer=int(Need.LEADS)
):
    """Plans ``fn`` as if a product consumed its outputs.

    ``leaves`` says what the first arguments are, the others are data; with ``consumer=0`` nothing
    is known to consume the outputs.
    """
    planner = Planner(policy)
    closed = planner.prepare(trace(fn, *args))
    avals = [v.aval for v in closed.jaxpr.invars]
    kinds = [*leaves, *(Source.DATA,) * (len(avals) - len(leaves))]
    dtypes = [float_dtype(aval) for aval in avals]
    marks = [PARAMETER if leaf is Source.PARAM else GIVEN for leaf in kinds]
    found = zip(dtypes, kinds, marks, strict=True)
    inputs = [ValueState(dtype, leaf if dtype else None, marks=m) for dtype, leaf, m in found]
    wanted = (wanted or Request())._replace(needs=consumer)
    wanted = [wanted] * len(closed.jaxpr.outvars)
    if computed:
        wanted = computed_requests(planner, closed, inputs, wanted)
    return planner.plan_program(closed, inputs, wanted)


def all_equations(plan):
    """(equation, its plan) everywhere, what is inside an equation after it."""
    for eqn, planned in zip(plan.jaxpr.eqns, plan.equations, strict=True):
        yield eqn, planned
        for inner in planned.inner:
            yield from all_equations(inner)


def planned(plan, primitive):
    """The plan of the last equation of a primitive."""
    return [p for eqn, p in all_equations(plan) if eqn.primitive.name == primitive][-1]


def low(function):
    """``function`` of a value computed in the compute dtype, and of the other arguments."""
    return lambda x, *rest: function(x @ x, *rest)


def positions(n):
    """Angles of points with eight coordinates: positions times frequencies, as a matrix product."""
    return lambda f: jnp.broadcast_to(lax.iota(jnp.float32, n)[:, None], (n, 8)) @ f.reshape(8, 8)
