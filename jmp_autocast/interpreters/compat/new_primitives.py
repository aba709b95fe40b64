"""Making the package's own primitives: their rules for every transformation of JAX.

The registries of those rules have no public names. The same in all supported versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval


def _define_cpu_barrier(name: str) -> Any:
    """Makes the primitive of an ``optimization_barrier`` of one array, on CPUs alone."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    ad.deflinear2(primitive, lambda cotangent, x: [primitive.bind(cotangent)])
    batching.defvectorized(primitive)
    on_cpu = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive


cpu_barrier_p: Any = _define_cpu_barrier("cpu_barrier")


def define_linear_view(name: str) -> Any:
    """Makes the primitive of `leaf_view`: the value is ``low``, the tangent that of ``full``.

    A primitive and not a ``custom_jvp``, because it stands at each use of each parameter: it
    costs one equation to trace, and it lowers to nothing.
    """
    primitive = Primitive(name)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        out = primitive.bind(*primals)
        tangent = tangents[0]
        if type(tangent) is ad.Zero:
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        # XLA:CPU computes 16-bit arithmetic in float32. Where the cotangent is then summed, it
        # would keep all of it in float32 beside the 16-bit array that the contractions read.
        return out, cpu_barrier_p.bind(lax.convert_element_type(tangent, out.dtype))

    def transpose(cotangent: Any, full: Any, low: Any) -> list[Any]:
        # linear_transpose meets the view itself; the 16-bit copy carries no derivative.
        if type(cotangent) is ad.Zero or not ad.is_undefined_primal(full):
            return [None, None]
        return [lax.convert_element_type(cotangent, full.aval.dtype), None]

    def batch(operands: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        front = [_batch_at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]
        return primitive.bind(*front), 0

    primitive.def_impl(lambda full, low: low)
    primitive.def_abstract_eval(lambda full, low: low)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda ctx, full, low: [low])
    return primitive


def _batch_at_front(x: Any, dim: int | None, size: int) -> Any:
    if dim is None:
        return lax.broadcast(x, (size,))
    return jax.numpy.moveaxis(x, dim, 0)


def define_bilinear(
    name: str,
    *,
    aval: Callable,
    derivative: Callable,
    transpose: Callable,
    batch: Callable,
    lowered: Callable,
    lowered_on_cpu: Callable,
    contraction: Callable,
) -> Any:
    """Makes the primitive of `accumulating_contraction`; each function also gets its parameters.

    Args:
        name: The primitive's name.
        aval: Of the operands' abstract values; returns the result's.
        derivative: Of the index of an operand, its tangent and the operands; returns the result's
            tangent, None if there is none.
        transpose: Of the index of an operand, its abstract value, the cotangent and the operands;
            returns the operand's cotangent, None if there is none.
        batch: Of the operands and their batch dimensions; returns the result, batched in front.
        lowered: Of the operands; returns the result as ordinary operations.
        lowered_on_cpu: The same for the CPU.
        contraction: Of the parameter ``jaxpr``; returns the equation that does the work.
    """
    primitive = Primitive(name)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        out = primitive.bind(*primals, **params)
        found = [
            derivative(i, tangent, primals, **params)
            for i, tangent in enumerate(tangents)
            if type(tangent) is not ad.Zero
        ]
        terms = [term for term in found if term is not None]
        if not terms:
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, functools.reduce(ad.add_tangents, terms)

    def transpose_rule(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
        if type(cotangent) is ad.Zero:
            return [None] * len(operands)
        return [
            transpose(i, x.aval, cotangent, operands, **params)
            if ad.is_undefined_primal(x)
            else None
            for i, x in enumerate(operands)
        ]

    def batch_rule(operands: Any, dims: Any, *, leaves: Any, **params: Any) -> tuple[Any, int]:
        operands, dims = list(operands), list(dims)
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        for k, i in enumerate(leaves, len(operands) - len(leaves)):
            if dims[i] != dims[k]:  # a copy has the shape of its leaf
                for j in (i, k):
                    operands[j], dims[j] = _batch_at_front(operands[j], dims[j], size), 0
        return batch(operands, dims, leaves=leaves, **params), 0

    def remat_rule(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
        # A checkpoint policy knows the primitives of JAX: it is asked about the contraction.
        pairs = zip(eqn.invars, instantiated, strict=True)
        residuals = [x for x, known in pairs if isinstance(x, Var) and not known]
        if any(unknown):
            return None, eqn, [True], [True], residuals
        inner = contraction(eqn.params["jaxpr"])
        answer = saveable(inner.primitive, *(v.aval for v in inner.invars), **inner.params)
        if answer is True or type(answer).__name__ == "SaveableType":
            return eqn, None, [False], [False], []
        return eqn, eqn, [False], [True], residuals

    @functools.lru_cache(maxsize=4096)
    def compiled(params: tuple[tuple[str, Any], ...]) -> Callable:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    primitive.def_impl(lambda *operands, **params: compiled(tuple(params.items()))(*operands))
    primitive.def_abstract_eval(aval)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose_rule
    batching.primitive_batchers[primitive] = batch_rule
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = remat_rule
    # Not cached: a second equal equation would have the name stack of the first.
    rule = _lowered_by_platform(lowered, lowered_on_cpu)
    mlir.register_lowering(primitive, rule, cacheable=False)
    return primitive


def _lowered_by_platform(lowered: Callable, lowered_on_cpu: Callable) -> Callable:
    """One lowering rule for all platforms.

    JAX 0.10 to 0.12 cannot choose between several that are not cached, for `jax.export` to more
    platforms than one.
    """

    def of_several(*operands: Any, **params: Any) -> Any:
        return lax.platform_dependent(
            *operands,
            cpu=functools.partial(lowered_on_cpu, **params),
            default=functools.partial(lowered, **params),
        )

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        platforms = set(ctx.module_context.platforms)
        function = of_several if len(platforms) > 1 else lowered
        function = lowered_on_cpu if platforms == {"cpu"} else function
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands, **params)

    return rule
