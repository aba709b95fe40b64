"""Rebuilds custom derivative and batching rules, with the user's rule rewritten.

JAX's public transforms differentiate (or batch) the original primitive in the declared dtypes, and
so run the user's rule. The resulting jaxpr is planned and rewritten like any other. So this module
does not depend on how JAX stores rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..compat import (
    JaxprEqn,
    SymbolicZero,
    bind,
    consts_of,
    fresh_make_jaxpr,
    inlined,
    is_array_aval,
    is_computed_now,
    is_in_eager_shard_map,
    is_ref,
    mark_frames,
    trace_context,
    with_dtype,
    zero_cotangent,
)
from ..compat.settings import in_settings_of_now
from ..plan.avals import is_16_bit
from ..plan.data import EquationPlan, Request
from ..plan.needs import NOTHING, Need
from ..primitives.evaluate import of_positions
from ..primitives.structure import called
from .rewriter import Rewriter, check_immutable, rewrites
from .values import as_array, read

mark_frames(__file__)

# A residual is planned as if a product consumed it, so that it may be computed in 16 bits. This
# halves its memory, and products of the backward pass do consume most residuals.
_LEADS = Need.LEADS


def _primal(rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan) -> Callable[..., Any]:
    """Returns the rewritten function without its rule; JAX traces it only when needed."""
    inner, closed = plan.inner[0], called(eqn)
    check_immutable(closed, _declared_avals(eqn.invars))

    def function(*xs: Any) -> tuple[Any, ...]:
        return tuple(rewriter.evaluate(inner, consts_of(closed), xs))

    return function


def _original(eqn: JaxprEqn) -> Callable[..., tuple[Any, ...]]:
    return lambda *xs: tuple(bind(eqn.primitive, xs, eqn.params))


def _declared_avals(variables: Sequence[Any]) -> list[Any]:
    return [
        with_dtype(v.aval, v.aval.dtype) if is_array_aval(v.aval) else v.aval for v in variables
    ]


def _has_tangent(aval: Any) -> bool:
    """Returns whether a value may have tangents: a float, also in float64, or a complex value."""
    return is_array_aval(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


@rewrites("custom_jvp_call", "custom_vjp_call")
def _emitted(
    rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]
) -> list[Any]:
    """Emits an equation with a derivative rule.

    All equations with the same rule and plan call one inlined function, which JAX traces and
    differentiates once. To rebuild a rule takes 5 ms under differentiation and 0.4 ms otherwise,
    and MobileNetV2 calls ``jax.nn.relu6`` 35 times.
    """
    xs, inner = read(plan, operands), plan.inner[0]
    # An equation with effects is emitted alone, because its effects have an order. So is an
    # equation with a ref as an operand, because JAX does not inline a function of a ref.
    is_alone = bool(eqn.effects) or any(is_ref(v.aval) for v in eqn.invars)
    is_alone = is_alone or rewriter.looks_at(eqn) or not inner.equations
    # Outside of `jit`, no function is shared: JAX would compile it at each call of `autocast`.
    is_shared = not (is_alone or all(map(is_computed_now, xs)))
    is_original = plan.unchanged and not rewriter.looks_at(eqn)
    if is_original and not is_shared:
        return list(_original(eqn)(*xs))
    if any(map(is_in_eager_shard_map, xs)) and eqn.primitive.name == "custom_vjp_call":
        return list(_primal(rewriter, eqn, plan)(*xs))
    # The id of `inner.equations` identifies the body: plans of equal jaxprs share this tuple.
    of_plan = id(inner.equations), inner.inputs, inner.outputs, inner.output_dtypes
    rule = None if is_alone else rewriter.closed_over.rule_of(eqn)
    key = (id(inner), eqn.primitive.name) if is_alone else (of_plan, rule)
    if key not in rewriter.memo:
        is_jvp = eqn.primitive.name == "custom_jvp_call"
        rebuilt = _rebuilt_custom_jvp if is_jvp else _rebuilt_custom_vjp
        rewriter.memo[key] = _original(eqn) if is_original else rebuilt(rewriter, eqn, plan)
    function = rewriter.memo[key]
    if is_shared:
        if (inlined_key := (key, "inlined")) not in rewriter.memo:
            rewriter.memo[inlined_key] = inlined(function)
        function = rewriter.memo[inlined_key]
    return list(function(*xs))


def _as_in(dtype: Any) -> Request:
    """Returns the request for an output of a rule that must have the given dtype."""
    return Request(dtype=dtype, needs=_LEADS if is_16_bit(dtype) else NOTHING)


def _rebuilt_custom_jvp(rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan) -> Callable:
    function = jax.custom_jvp(_primal(rewriter, eqn, plan))
    inner, original = plan.inner[0], _original(eqn)
    avals = _declared_avals(eqn.invars)
    traced: dict[Any, Any] = {}

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        # A symbolically zero tangent stays symbolic: a rule with `symbolic_zeros` distinguishes it
        # from an array of zeros.
        pairs = enumerate(zip(tangents, avals, strict=True))
        moving = [i for i, (t, a) in pairs if type(t) is not SymbolicZero and _has_tangent(a)]

        def original_jvp(xs: Sequence[Any], ts: Sequence[Any]) -> Any:
            return jax.jvp(of_positions(original, xs, moving), [xs[i] for i in moving], ts)

        # The original primitive is differentiated in declared dtypes, as without autocast. The
        # jaxpr contains the user's rule, and is planned like any other.
        if (key := (tuple(moving), trace_context())) not in traced:
            traced[key] = fresh_make_jaxpr(original_jvp, avals, [avals[i] for i in moving])
        dtypes = [_as_in(s.dtype) for s in inner.outputs]
        args = [*primals, *(tangents[i] for i in moving)]
        flat = rewriter.run(traced[key], args, [*dtypes, *dtypes], inner)
        return tuple(flat[: len(dtypes)]), tuple(flat[len(dtypes) :])

    function.defjvp(in_settings_of_now(rule), symbolic_zeros=True)
    return function


class _Static:
    """A pytree without leaves that holds the static data of the backward rule."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_pytree_node(_Static, lambda s: ((), s.value), lambda aux, _: _Static(aux))


def _rebuilt_custom_vjp(rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan) -> Callable:
    function = jax.custom_vjp(_primal(rewriter, eqn, plan))
    inner, original = plan.inner[0], _original(eqn)
    avals, out_avals = _declared_avals(eqn.invars), _declared_avals(eqn.outvars)
    inexact = [k for k, a in enumerate(out_avals) if _has_tangent(a)]

    def forward(*perturbed: Any) -> tuple[Any, Any]:
        xs = [as_array(p.value, a) for p, a in zip(perturbed, avals, strict=True)]
        pairs = enumerate(zip(perturbed, avals, strict=True))
        moving = tuple(i for i, (p, a) in pairs if p.perturbed and _has_tangent(a))
        # The result of `jax.vjp` is a pytree of residuals with a static structure.
        box: dict[str, Any] = {}

        def original_forward(*ys: Any) -> Any:
            out, vjp = jax.vjp(of_positions(original, ys, moving), *(ys[i] for i in moving))
            residuals, box["tree"] = jax.tree_util.tree_flatten(vjp)
            box["avals"] = [jax.typeof(r) for r in residuals]
            # A trace cannot return a ref. If a residual is a ref, it is also an operand, which a
            # rule passes on to take gradients or statistics out of the backward pass. `refs` holds
            # the position of that operand.
            box["refs"] = {
                k: next(i for i, y in enumerate(ys) if y is r)
                for k, r in enumerate(residuals)
                if is_ref(jax.typeof(r))
            }
            return out, [r for k, r in enumerate(residuals) if k not in box["refs"]]

        closed = fresh_make_jaxpr(original_forward, *avals)
        # Outputs get the dtypes of the primal function's results. Residuals keep the dtypes in
        # which they are computed.
        requests = [_as_in(s.dtype) for s in inner.outputs]
        requests += [Request(needs=_LEADS)] * (len(box["avals"]) - len(box["refs"]))
        flat = rewriter.run(closed, xs, requests, inner)
        n = len(out_avals)
        for k, i in sorted(box["refs"].items()):
            flat.insert(n + k, xs[i])
        dtypes = tuple(jax.typeof(x).dtype for x in xs)
        static = _Static((moving, box["tree"], tuple(box["avals"]), dtypes))
        return tuple(flat[:n]), (flat[n:], static)

    def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        residuals, static = saved
        moving, tree, residual_avals, dtypes = static.value

        # For an output without a cotangent, the user's rule gets a symbolic zero.
        known = [k for k in inexact if type(cotangents[k]) is not SymbolicZero]

        def original_backward(residuals: Sequence[Any], given: Sequence[Any]) -> Any:
            full = [zero_cotangent(a) for a in out_avals]
            for k, cotangent in zip(known, given, strict=True):
                full[k] = cotangent
            return jax.tree_util.tree_unflatten(tree, residuals)(tuple(full))

        given, given_avals = ([x[k] for k in known] for x in (cotangents, out_avals))
        closed = fresh_make_jaxpr(original_backward, list(residual_avals), given_avals)
        requests = [_as_in(dtypes[i]) for i in moving]
        found = rewriter.run(closed, [*residuals, *given], requests, inner)
        gradients: list[Any] = [None] * len(avals)
        for i, gradient in zip(moving, found, strict=True):
            # A gradient must have the dtype of its primal, which may be the 16-bit copy of a
            # weight.
            is_cast = gradient.dtype != dtypes[i]
            gradients[i] = lax.convert_element_type(gradient, dtypes[i]) if is_cast else gradient
        return tuple(gradients)

    rules = map(in_settings_of_now, (forward, backward))
    function.defvjp(*rules, symbolic_zeros=True)
    return function


@rewrites("custom_vmap_call")
def _custom_vmap(rewriter: Rewriter, eqn: JaxprEqn, plan: EquationPlan, operands: list[Any]) -> Any:
    function = jax.custom_batching.custom_vmap(_primal(rewriter, eqn, plan))
    inner, original = plan.inner[0], _original(eqn)
    avals = _declared_avals(eqn.invars)

    @function.def_vmap
    @in_settings_of_now
    def rule(size: int, batched: Sequence[bool], *xs: Any) -> tuple[Any, Any]:
        mapped = jax.vmap(original, in_axes=[0 if b else None for b in batched], axis_size=size)
        batch_avals = [
            a.update(shape=(size, *a.shape)) if b else a
            for a, b in zip(avals, batched, strict=True)
        ]
        closed = fresh_make_jaxpr(mapped, *batch_avals)
        requests = [_as_in(s.dtype) for s in inner.outputs]
        flat = rewriter.run(closed, xs, requests, inner)
        return tuple(flat), (True,) * len(flat)

    return list(function(*read(plan, operands)))
