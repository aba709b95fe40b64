"""Equations written into the jaxpr that JAX is tracing: those that do not change, and casts.

The primitive of an equation that does not change need not be bound: the equation says the types of
its results, its settings and its source line. That takes a quarter of the time, for three quarters
of the equations of a GPT-2: casts stand around its products. Rewriting it took 37 ms, and takes 27.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from . import Tracer, whole_name_stack
from .private_names import private

_WRITES_A_JAXPR = "jax._src.interpreters.partial_eval.DynamicJaxprTrace"


def staged_as_it_is(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Returns the results of an equation that was added to the jaxpr of the current trace.

    What rules JAX has about writing such an equation (folding, forwarding) has been decided when it
    was traced: they look at the types of its operands, and would decide so again.

    Args:
        eqn: The equation, of a primitive that takes values and holds no function.
        operands: Its operands; what stands where the equation reads a literal is not looked at.

    Returns:
        The results; None where it has to be bound: where JAX does something else than write a
        jaxpr, where an operand has another type than in the equation or belongs to another trace,
        or none is traced, where the primitive has to be lowered before XLA sees it, and where this
        JAX writes jaxprs in a way that is not known here.
    """
    try:
        return _staged(eqn, operands)
    except (AttributeError, TypeError):
        return None


def _staged(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    trace = private("jax._src.core.trace_ctx").trace
    if type(trace) is not private(_WRITES_A_JAXPR) or eqn.effects:
        return None
    info = eqn.source_info.replace(name_stack=whole_name_stack(eqn))
    tracers, is_traced = [], False
    for atom, x in zip(eqn.invars, operands, strict=True):
        if isinstance(atom, jex_core.Literal):
            tracers.append(trace.new_const(atom.val, info, atom.aval))
            continue
        is_tracer = isinstance(x, Tracer)
        # A tracer of another trace may be one that has escaped, for which binding has an error.
        if not isinstance(x, jax.Array) or (is_tracer and getattr(x, "_trace", None) is not trace):
            return None
        tracer = trace.to_jaxpr_tracer(x, info)
        if tracer.aval != atom.aval:
            return None
        is_traced = is_traced or is_tracer
        tracers.append(tracer)
    # What is known may be computed at once, if the user has asked JAX for that.
    if not is_traced or _may_be_high(eqn.primitive):
        return None
    avals = [v.aval for v in eqn.outvars]
    return trace.emit_eqn(tracers, avals, eqn.primitive, eqn.params, eqn.effects, info, eqn.ctx)


def _may_be_high(primitive: Any) -> bool:
    """Whether JAX may lower a primitive in a pass of its own, such as `Nonzero` from 0.12 on.

    A jaxpr says so. By default only what holds a jaxpr is lowered so.
    """
    return getattr(primitive.is_high, "__func__", None) is not jex_core.Primitive.is_high


def converted(x: Any, dtype: np.dtype) -> Any:
    """Returns an array in another dtype.

    Args:
        x: The array.
        dtype: The dtype.
    """
    if isinstance(x, Tracer) and x.dtype != dtype:
        # What `lax.convert_element_type` comes to, which takes 5 microseconds to find that out.
        return lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=False, sharding=None)
    return lax.convert_element_type(x, dtype)
