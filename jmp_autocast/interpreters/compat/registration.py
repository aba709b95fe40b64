"""Registers the package's own primitives with JAX.

The rules are beside each primitive, in `interpreters/primitives`. JAX's tables of rules have no
public API, but are the same in all supported versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

from .private_names import private

add_tangents: Callable[[Any, Any], Any] = ad.add_tangents
is_undefined_primal: Callable[[Any], bool] = ad.is_undefined_primal


def is_zero(tangent: Any) -> bool:
    """Returns whether a tangent or cotangent is JAX's symbolic zero, which is no array."""
    return type(tangent) is ad.Zero


def zero_tangent(x: Any) -> Any:
    """Returns the symbolic zero as the tangent of an array."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def define_primitive(
    name: str,
    *,
    aval: Callable[..., Any],
    value: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
) -> Any:
    """Creates a primitive with one result.

    Args:
        name: The primitive's name, as jaxprs print it.
        aval: Computes the abstract value of the result from the abstract values of the operands.
        value: Computes the result from arrays, outside of any trace; None to compile the lowering.
        jvp: Computes the result and its tangent from primals and tangents.
        transpose: Computes the cotangents of the operands from the result's cotangent and the
            operands, of which the linear ones are undefined primals.
        batch: Computes the result and its batch dimension from operands and their batch dimensions.

    Returns:
        The primitive, without a lowering.
    """
    primitive = Primitive(name)
    primitive.def_impl(value or _compiled(primitive))
    primitive.def_abstract_eval(aval)
    tables = ad.primitive_jvps, ad.primitive_transposes, batching.primitive_batchers
    for table, rule in zip(tables, (jvp, transpose, batch), strict=True):
        if rule is not None:
            table[primitive] = rule
    return primitive


def _compiled(primitive: Any) -> Callable[..., Any]:
    """Returns a function that runs a primitive alone, compiled once for each set of parameters."""

    @functools.lru_cache(maxsize=4096)
    def compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    def run(*operands: Any, **params: Any) -> Any:
        # `jit` is enabled here. Otherwise, JAX would call the function, which binds the primitive
        # again, in an endless recursion.
        with jax.disable_jit(False):
            return compiled(tuple(params.items()))(*operands)

    return run


def acts_on_each_element(primitive: Any) -> None:
    """Registers the rules of a primitive that returns its one operand, element by element."""
    ad.deflinear2(primitive, lambda cotangent, x: [primitive.bind(cotangent)])
    batching.defvectorized(primitive)


STAND_INS: dict[Any, dict[str, Callable[..., Any]]] = {}
"""The replacement of each of the package's primitives by JAX operations: for each platform, a
function of arrays that takes the parameters by keyword. A platform that is not listed uses
``"default"``.
"""


def plain_function(
    primitive: Any, params: Mapping[str, Any], platform: str
) -> Callable[..., Any] | None:
    """Returns an equation as a function of JAX operations; None if its primitive is JAX's own.

    Args:
        primitive: The primitive of the equation.
        params: Its parameters.
        platform: A platform, as `jax.default_backend` names it.
    """
    if (functions := STAND_INS.get(primitive)) is None:
        return None
    return functools.partial(functions.get(platform, functions["default"]), **params)


def lowers_to_operand(primitive: Any, position: int) -> None:
    """Lowers a primitive to one of its operands, without an operation."""
    mlir.register_lowering(primitive, lambda ctx, *operands, **_: [operands[position]])
    STAND_INS[primitive] = {"default": lambda *operands, **_: operands[position]}


def lowers_by_platform(
    primitive: Any, default: Callable[..., Any], **by_platform: Callable[..., Any]
) -> None:
    """Lowers a primitive as a function of arrays, with other functions for some platforms.

    JAX lowers equal equations once per module and inlines the function at the location of each
    equation. An equation inside of a `shard_map` is lowered apart from an equal equation outside of
    it, because the cache key of a lowering includes the mesh context.

    Args:
        primitive: The primitive.
        default: A function of arrays that takes the parameters by keyword.
        **by_platform: The function for a platform, by its name. ``one_cpu`` is for programs on one
            CPU device, ``cpu`` for programs that XLA splits over several.
    """
    one_cpu = by_platform.pop("one_cpu", by_platform.get("cpu", default))
    on_several = {"default": default, **by_platform}
    on_one = {**on_several, "cpu": one_cpu}

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        platform, *others = set(ctx.module_context.platforms)
        # Inside of a `shard_map` the context has no number of devices. The body is lowered as for
        # one device, because each device runs the whole body.
        alone = getattr(ctx.module_context.axis_context, "num_devices", None) in (None, 1)
        functions = on_one if alone else on_several
        bound: Any = {name: functools.partial(f, **params) for name, f in functions.items()}
        function = bound.get(platform, bound["default"])
        if others:
            function = functools.partial(lax.platform_dependent, **bound)
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)

    mlir.register_lowering(primitive, rule)
    STAND_INS[primitive] = on_one


def lowers_to_row_major(primitive: Any) -> None:
    """Lowers a primitive to its one operand; on one NVIDIA GPU, in row-major layout.

    `jax.export` refuses the custom call that sets a layout. On several devices, XLA would gather
    the operand of that call, such as a float32 weight from its shards. In both cases the operand
    keeps its layout.
    """

    def rule(ctx: Any, operand: Any) -> Any:
        module = ctx.module_context
        # Inside of a `shard_map` the context has no number of devices, and no layout is set.
        is_alone = getattr(module.axis_context, "num_devices", None) == 1
        is_cuda = tuple(module.platforms) == ("cuda",)
        layouts = private("jax.experimental.layout.Layout")
        with_layout_constraint = private("jax.experimental.layout.with_layout_constraint")
        if layouts is None or with_layout_constraint is None or not (is_alone and is_cuda):
            return [operand]
        if module.lowering_parameters.for_export:
            return [operand]
        layout = layouts(major_to_minor=tuple(range(ctx.avals_in[0].ndim)))
        pinned = mlir.lower_fun(lambda x: with_layout_constraint(x, layout), False)
        return pinned(ctx, operand)

    mlir.register_lowering(primitive, rule, cacheable=False)
    STAND_INS[primitive] = {"default": lambda x: x}


def saved_as(primitive: Any, stands_for: Callable[[Any], Any]) -> None:
    """Makes checkpoint policies treat one of the package's primitives as an equation of JAX.

    A policy such as ``dots_saveable`` compares names of JAX's primitives, and would otherwise
    recompute the package's products.

    Args:
        primitive: The primitive.
        stands_for: Returns the equation of JAX that an equation of the primitive replaces.
    """

    def rule(saveable: Any, unknown: Any, instantiated: Any, eqn: JaxprEqn) -> Any:
        pairs = zip(eqn.invars, instantiated, strict=True)
        residuals = [x for x, known in pairs if isinstance(x, Var) and not known]
        if any(unknown):
            return None, eqn, [True], [True], residuals
        inner = stands_for(eqn)
        answer = saveable(inner.primitive, *(v.aval for v in inner.invars), **inner.params)
        if answer is True or type(answer).__name__ == "SaveableType":
            return eqn, None, [False], [False], []
        return eqn, eqn, [False], [True], residuals

    rules = private("jax.interpreters.partial_eval.partial_eval_jaxpr_custom_rules")
    if rules is not None:
        rules[primitive] = rule


def at_front(x: Any, dim: int | None, size: int) -> Any:
    """Returns an operand of a batched equation with its batch dimension first.

    Args:
        x: The operand.
        dim: Its batch dimension; None if it has none.
        size: The size of the batch.
    """
    return lax.broadcast(x, (size,)) if dim is None else jax.numpy.moveaxis(x, dim, 0)


def all_at_front(operands: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Returns the operands of a batched equation, each with its batch dimension first."""
    size = batch_size(operands, dims)
    return [at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]


def batch_size(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    """Returns the size of the batch, read from the operands of a batched equation."""
    return next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)


def transposed_by(jaxpr: ClosedJaxpr, operands: Sequence[Any], cotangent: Any) -> Any:
    """Transposes a closed jaxpr that is linear in one operand; returns that operand's cotangent.

    ``operands`` holds None for that operand. Unlike `jax.linear_transpose`, this function accepts a
    cotangent whose type differs from the result's type.
    """
    backward_pass = private("jax._src.interpreters.ad.backward_pass")
    if backward_pass is None:
        raise NotImplementedError(
            "This release of JAX has no transpose of a product whose result is unreduced. Reshard "
            "the result of the product before it is differentiated."
        )
    avals = [v.aval for v in jaxpr.jaxpr.invars]
    pairs = zip(operands, avals, strict=True)
    primals = [ad.UndefinedPrimal(a.to_ct_aval()) if x is None else x for x, a in pairs]
    found = backward_pass(jaxpr.jaxpr, True, jaxpr.consts, primals, [cotangent])
    return ad.instantiate_zeros(found[[x is None for x in operands].index(True)])
