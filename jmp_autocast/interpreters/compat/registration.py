"""Registering primitives of our own: JAX's registries of rules have no public names.

The rules themselves are beside their primitive, in `interpreters/primitives`; this module registers
them with JAX. The same in all supported versions.
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
    """Returns whether a tangent or cotangent is the symbolic zero, which no equation computes."""
    return type(tangent) is ad.Zero


def zero_tangent(x: Any) -> Any:
    """Returns the symbolic zero that is the tangent of an array."""
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
    """Makes a primitive with one result.

    Args:
        name: The primitive's name, as jaxprs print it.
        aval: Computes the abstract value of the result from those of the operands.
        value: Computes the result from arrays, outside any trace; None to compile the lowering.
        jvp: From primals and tangents to the result and its tangent.
        transpose: From the cotangent and the operands, with linear operands undefined, to the
            cotangents of the operands.
        batch: From operands and their batch dimensions to the result and its batch dimension.

    Returns:
        The primitive; it still needs a lowering.
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
        # Without `jit` JAX would call the function itself, which binds the primitive again.
        with jax.disable_jit(False):
            return compiled(tuple(params.items()))(*operands)

    return run


def acts_on_each_element(primitive: Any) -> None:
    """Registers the rules of a primitive of one operand that is the identity on its elements."""
    ad.deflinear2(primitive, lambda cotangent, x: [primitive.bind(cotangent)])
    batching.defvectorized(primitive)


STAND_INS: dict[Any, dict[str, Callable[..., Any]]] = {}
"""The JAX operations of each of our primitives, by platform: functions of arrays that take the
parameters by keyword. Platforms without one of their own have that of ``"default"``."""


def plain_function(
    primitive: Any, params: Mapping[str, Any], platform: str
) -> Callable[..., Any] | None:
    """Returns an equation of our primitives as a function of arrays, None for JAX's primitives.

    Args:
        primitive: The primitive of the equation.
        params: Its parameters.
        platform: A platform, as `jax.default_backend` names it.
    """
    if (functions := STAND_INS.get(primitive)) is None:
        return None
    return functools.partial(functions.get(platform, functions["default"]), **params)


def lowers_to_operand(primitive: Any, position: int) -> None:
    """Lowers a primitive to nothing: its result is one of its operands."""
    mlir.register_lowering(primitive, lambda ctx, *operands, **_: [operands[position]])
    STAND_INS[primitive] = {"default": lambda *operands, **_: operands[position]}


def lowers_by_platform(
    primitive: Any, default: Callable[..., Any], **by_platform: Callable[..., Any]
) -> None:
    """Lowers a primitive as a function of arrays, with another function for some platforms.

    JAX lowers equal equations once per module, and inlines the function under the location of each
    equation. Its key includes the mesh context, which differs inside and outside a `shard_map`.

    Args:
        primitive: The primitive.
        default: A function of arrays that takes the parameters by keyword.
        **by_platform: Another one by the name of a platform. ``one_cpu`` is for programs of one
            CPU, ``cpu`` for those that XLA splits over several.
    """
    one_cpu = by_platform.pop("one_cpu", by_platform.get("cpu", default))
    on_several = {"default": default, **by_platform}
    on_one = {**on_several, "cpu": one_cpu}

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        platform, *others = set(ctx.module_context.platforms)
        # A `shard_map` has a context without a number of devices: all of it runs on each.
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
    """Lowers a primitive of one operand to that operand, for one NVIDIA GPU in row-major layout.

    `jax.export` refuses the custom call for a layout, and for several devices XLA would gather its
    operand, such as a float32 weight from its shards. Neither case uses the call.
    """

    def rule(ctx: Any, operand: Any) -> Any:
        module = ctx.module_context
        # A `shard_map` has a context without a number of devices.
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
    """Makes checkpoint policies treat a primitive of ours as an equation of JAX.

    A policy such as ``dots_saveable`` knows the primitives of JAX by name, and would recompute our
    products.

    Args:
        primitive: The primitive.
        stands_for: From an equation of the primitive to an equation of JAX.
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
    """Returns an operand of a batched equation with its batch dimension in front.

    Args:
        x: The operand.
        dim: Its batch dimension, None where all elements of the batch share it.
        size: The number of elements of the batch.
    """
    return lax.broadcast(x, (size,)) if dim is None else jax.numpy.moveaxis(x, dim, 0)


def all_at_front(operands: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Returns the operands of a batched equation, each with the dimension of the batch in front."""
    size = batch_size(operands, dims)
    return [at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]


def batch_size(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    """Returns the number of elements of the batch that the operands of an equation hold."""
    return next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)


def transposed_by(jaxpr: ClosedJaxpr, operands: Sequence[Any], cotangent: Any) -> Any:
    """Returns the cotangent of the one operand that is None, in which a closed jaxpr is linear.

    Unlike `jax.linear_transpose` it takes the cotangent of a result whose type is not its own.
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
