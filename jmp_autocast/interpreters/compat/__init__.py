"""Adapters to JAX. Only this package depends on JAX's version or on its private names.

An adapter for one version names that version. Supported: JAX 0.10 to the newest release.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex_core
import numpy as np
from jax.custom_derivatives import SymbolicZero as SymbolicZero
from jax.extend import source_info_util

from . import avals, registration
from .avals import (
    ASSUMED_LENGTH as ASSUMED_LENGTH,
    assumed_size as assumed_size,
    aval_of as aval_of,
    device_varying as device_varying,
    is_array_aval as is_array_aval,
    is_on_host as is_on_host,
    is_ref as is_ref,
    is_unreduced as is_unreduced,
    may_change as may_change,
    set_weak_type as set_weak_type,
    summed_sharding as summed_sharding,
    varying_axes as varying_axes,
    with_dtype as with_dtype,
    zero_cotangent as zero_cotangent,
)
from .private_names import private
from .scans import scan_split as scan_split, scan_with_more as scan_with_more
from .settings import (
    float64_for,
    is_checked as is_checked,
    trace_context as trace_context,
    without_nan_checks as without_nan_checks,
)

Jaxpr: TypeAlias = jex_core.Jaxpr
ClosedJaxpr: TypeAlias = jex_core.ClosedJaxpr
JaxprEqn: TypeAlias = jex_core.JaxprEqn
Literal: TypeAlias = jex_core.Literal
Var: TypeAlias = jex_core.Var
# A variable or a literal. For `pyright --verifytypes`, the type of JAX's own union is partially
# unknown.
Atom: TypeAlias = Any
# JAX 0.11 merged `Jaxpr` and `ClosedJaxpr`.
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
ShapedArray: Any = jax.core.ShapedArray
Tracer: Any = jax.core.Tracer
JAXPRS: tuple[Any, ...] = (jex_core.Jaxpr, jex_core.ClosedJaxpr)
jaxpr_as_fun: Callable[[Any], Callable[..., Any]] = jex_core.jaxpr_as_fun
# JAX 0.10.0 defines `InconclusiveDimensionOperation` in jax.extend.core only; later versions
# deprecate that name there.
_errors = jax.errors if hasattr(jax.errors, "InconclusiveDimensionOperation") else jex_core
InconclusiveDimensionOperation = _errors.InconclusiveDimensionOperation
current_name_stack: Callable[..., Any] = source_info_util.current_name_stack


def mark_frames(file: str) -> None:
    """Hides the frames of a file when JAX looks for the user's source line of an equation."""
    source_info_util.register_exclusion(file)


def hide_package() -> None:
    """Hides the frames of the whole package in the tracebacks that JAX filters.

    `mark_frames` affects the source lines of equations only. For the tracebacks of errors that pass
    ``jit``, ``grad`` or ``make_jaxpr``, JAX hides the files under registered folders, and the
    function that registers a folder is private. ``JAX_TRACEBACK_FILTERING=off`` shows all frames.
    """
    register = private("jax._src.traceback_util.register_exclusion")
    if register is not None:
        register(str(pathlib.Path(__file__).parents[2]))


hide_package()
mark_frames(__file__)
mark_frames(avals.__file__)
mark_frames(registration.__file__)


# --- jaxprs ---------------------------------------------------------------------------------


def body_of(jaxpr: AnyJaxpr) -> Jaxpr:
    """Returns the open jaxpr of a closed one, and an open one as it is.

    JAX 0.11 merged ``ClosedJaxpr`` into ``Jaxpr``; from then on, ``.jaxpr`` returns the object
    itself.
    """
    body: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return body


def variables_in(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the variables in a sequence of variables and literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def consts_of(jaxpr: AnyJaxpr) -> Sequence[Any]:
    """Returns the constants of a jaxpr; before JAX 0.11, an open jaxpr has no such attribute."""
    return getattr(jaxpr, "consts", ())


def open_jaxpr(closed: AnyJaxpr) -> Jaxpr:
    """Opens a jaxpr for an equation parameter that must have no constants (remat, shard_map)."""
    if consts_of(closed):
        raise AssertionError("an open jaxpr must have no constants")
    return body_of(closed)


def fresh_make_jaxpr(fun: Callable, *avals: Any) -> ClosedJaxpr:
    """Traces a function as `jax.make_jaxpr` does, without its cache.

    The cache would keep alive the values or tracers that the function closes over. Errors name the
    function that ``fun`` wraps (``__wrapped__``) and the arguments of its signature.
    """

    @functools.wraps(fun, updated=())
    def fresh(*args: Any) -> Any:
        return fun(*args)

    return jax.make_jaxpr(fresh)(*avals)


def inner_jaxpr_key(params: dict[str, Any]) -> str:
    """Returns the name of the parameter that holds the called jaxpr.

    The parameter is ``jaxpr`` in ``jit`` and ``remat2``, ``call_jaxpr`` in ``closed_call`` and in
    functions with custom rules, and ``fwd_jaxpr`` in ``remat_opt`` (``optimize_remat``).
    """
    return next(key for key in ("jaxpr", "call_jaxpr", "fwd_jaxpr") if key in params)


def jax_function(jaxpr: AnyJaxpr) -> str:
    """Returns the name of the function from which a jaxpr was traced if JAX defines it, else "".

    ``jax.experimental`` counts as user code, because its kernels have rules written in JAX.
    """
    info, folder = body_of(jaxpr).debug_info, jax.__file__.removesuffix("__init__.py")
    path = info.func_filename or ""
    is_own = path.startswith(folder) and not path.startswith(f"{folder}experimental")
    return info.func_name if is_own else ""


def function_name(jaxpr: AnyJaxpr) -> str:
    """Returns the name of the function from which a jaxpr was traced."""
    return body_of(jaxpr).debug_info.func_name


def without_dead_equations(jaxpr: Jaxpr) -> Jaxpr:
    """Returns an open jaxpr without the equations that no output needs; all inputs stay."""
    dce_jaxpr = private("jax.interpreters.partial_eval.dce_jaxpr")
    if dce_jaxpr is None:
        return jaxpr
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


# --- equations ------------------------------------------------------------------------------


def bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a primitive with the parameters of an equation.

    ``get_bind_params`` turns the jaxprs of custom rules back into functions.
    """
    return primitive.bind(*operands, **primitive.get_bind_params(params))


def bound(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Binds an equation with other operands and returns its results.

    Args:
        eqn: The equation.
        operands: The operands.
    """
    made = bind(eqn.primitive, operands, eqn.params)
    return list(made) if eqn.primitive.multiple_results else [made]


def inlined(function: Callable) -> Callable:
    """Returns a jitted function that traces inline: a call leaves no ``jit`` equation."""
    return jax.jit(function, inline=_INLINE)


def inlined_once(function: Callable, types: Sequence[Any]) -> Callable[..., list[Any]]:
    """Traces a function once and returns a function that inserts the traced equations at each call.

    Args:
        function: A function of arrays, which returns a list of arrays.
        types: The types of its arguments.
    """
    closed = fresh_make_jaxpr(function, *types)
    primitive, of_one = _inlined_call(trace_context())
    params = {**of_one, "jaxpr": closed}
    body = body_of(closed)
    sizes = {"in_": len(body.invars), "donated": len(body.invars), "out_": len(body.outvars)}
    for prefix, size in sizes.items():
        params |= {k: v * size for k, v in params.items() if k.startswith(prefix)}
    return lambda *arrays: bind(primitive, arrays, params)


@functools.lru_cache(maxsize=16)
def _inlined_call(context: Hashable) -> tuple[Any, dict[str, Any]]:
    """Returns the primitive and the parameters of an inlined ``jit`` of one array."""

    def window(x: Any) -> Any:
        return -x

    (eqn,) = body_of(fresh_make_jaxpr(jax.jit(window), np.float32(0))).eqns
    return eqn.primitive, {**eqn.params, "inline": _INLINE}


# Since JAX 0.11, ``inline`` is an enum, and True means inlining at lowering time.
_INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


@contextlib.contextmanager
def equation_context(eqn: JaxprEqn, stack: Any = None) -> Iterator[None]:
    """Returns a context whose equations get the source line and name stack of a user's equation.

    Args:
        eqn: The user's equation.
        stack: The whole name stack; None for the current name stack followed by the equation's own.
    """
    stack = whole_name_stack(eqn) if stack is None else stack
    user = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    # `eqn.ctx` does not record `jax.enable_x64`; the types of the equation show whether it was on.
    with user, eqn.ctx.manager, float64_for(_avals(eqn)):
        yield


def needs_float64(eqn: JaxprEqn) -> bool:
    """Returns whether an equation has 64-bit types that JAX's current settings cannot create."""
    return not isinstance(float64_for(_avals(eqn)), contextlib.nullcontext)


def _avals(eqn: JaxprEqn) -> list[Any]:
    return [v.aval for v in (*eqn.invars, *eqn.outvars)]


@contextlib.contextmanager
def named_in_errors(eqn: JaxprEqn) -> Iterator[None]:
    """Adds the user's source line to JAX's errors about a NaN or an infinity.

    Under ``jit``, JAX runs the program again and drops the frames that would show the line.
    """
    try:
        yield
    except Exception as error:  # the type of the error may be private to JAX
        kind = type(error).__name__
        if not isinstance(error, FloatingPointError) and kind != "InternalFloatingPointError":
            raise
        if kind == "InternalFloatingPointError":
            # `jit` would convert JAX's internal error to the public one.
            public = FloatingPointError(f"invalid value encountered in {eqn.primitive.name}")
            public.add_note(_place(eqn))
            raise public from None
        if not getattr(error, "__notes__", ()):
            error.add_note(_place(eqn))
        raise


def _place(eqn: JaxprEqn) -> str:
    line = source_line(eqn)
    file, number = (*line.split(" ")[0].split(":"), "0")[:2]
    text = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f"The operation is {eqn.primitive.name} at {line}: {text}"


def scope_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the ``jax.named_scope`` names around an equation, relative to its jaxpr.

    Transformations in the name stack (``jvp``, ``transpose``) are left out.
    """
    stack = eqn.source_info.name_stack.stack
    return tuple([s.name for s in stack if type(s).__name__ == "Scope"]) if stack else ()


def name_stack(eqn: JaxprEqn) -> str:
    """Returns the name stack of an equation as text, with its scopes and transformations."""
    return str(eqn.source_info.name_stack)


def whole_name_stack(eqn: JaxprEqn) -> Any:
    """Returns the current name stack, followed by the equation's own."""
    return current_name_stack() + eqn.source_info.name_stack


def name_entries(eqns: Sequence[JaxprEqn]) -> tuple[Any, ...]:
    """Returns the entries of the name stacks of nested equations, outermost first."""
    return tuple(entry for eqn in eqns for entry in eqn.source_info.name_stack.stack)


def name_scope(entries: Sequence[Any]) -> Any:
    """Returns a context that appends entries to the current name stack."""
    stack = source_info_util.NameStack(tuple(entries))
    return source_info_util.set_name_stack(current_name_stack() + stack)


def source_line(eqn: JaxprEqn) -> str:
    """Returns the user's source line of an equation, as JAX prints it."""
    return source_info_util.summarize(eqn.source_info)


def source_file_and_line(eqn: JaxprEqn) -> str:
    """Returns the file and the line of an equation in the user's program, without the column."""
    return ":".join(source_line(eqn).rsplit(" (", 1)[0].split(":")[:2])


def common_scopes(eqns: Sequence[JaxprEqn]) -> tuple[Any, ...]:
    """Returns the longest common prefix of the name stacks of equations."""
    first, *others = [eqn.source_info.name_stack.stack for eqn in eqns]
    for stack in others:
        if stack != first:
            same = [a == b for a, b in zip(first, stack, strict=False)]
            first = first[: [*same, False].index(False)]
    return first


def relative_contexts(eqns: Sequence[JaxprEqn], size: int) -> Hashable:
    """Returns each equation's context, and its name stack without the first ``size`` names."""
    return tuple([(eqn.ctx, eqn.source_info.name_stack.stack[size:]) for eqn in eqns])


def within_scopes(eqn: JaxprEqn, entries: Sequence[Any]) -> Any:
    """Returns an equation with another name stack."""
    info = eqn.source_info
    stack = source_info_util.NameStack(tuple(entries))
    same = info.name_stack.stack == stack.stack
    return eqn if same else eqn.replace(source_info=info.replace(name_stack=stack))


def call_with_operands(params: dict[str, Any], copied: Sequence[int]) -> dict[str, Any]:
    """Returns a call's parameters with operands appended.

    Args:
        params: The parameters.
        copied: For each new operand, the position of an old operand whose sharding and layout it
            gets. New operands are not donated.
    """
    updated = dict(params)
    for name in ("in_shardings", "in_layouts"):
        if name in params:
            updated[name] = (*params[name], *(params[name][i] for i in copied))
    if "donated_invars" in params:
        updated["donated_invars"] = (*params["donated_invars"], *(False for _ in copied))
    return updated


def has_no_options(params: dict[str, Any]) -> bool:
    """Returns whether a ``jit`` has no shardings, layouts or compiler options.

    JAX's placeholder for an omitted sharding has no public name, so its class is compared by name.
    """
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    given = [s for s in shardings if s is not None and type(s).__name__ != "UnspecifiedValue"]
    return not given and not any(layouts) and not params["compiler_options_kvs"]


def shard_map_axes(params: dict[str, Any]) -> set[Any]:
    """Returns the mesh axes that a ``shard_map`` makes manual.

    JAX 0.10.2 renamed ``manual_axes`` to ``newly_manual_axes``.
    """
    return set(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"])


def collective_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns the named axes over which an equation communicates, () for any other equation."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, tuple | list) else (names,)
    # Axes that are integers, also NumPy's, are positions of array axes, and have no name.
    return tuple(name for name in names if name is not None and not hasattr(name, "__index__"))


# --- values ---------------------------------------------------------------------------------


def literal_value(literal: Literal) -> Any:
    """Returns a literal's value in the dtype that the program declares.

    The value is a Python scalar if JAX gives such a scalar the type of the literal (a weak type of
    the default dtype), so that binding the equation again gives an equal equation.
    """
    value, aval = literal.val, aval_of(literal)
    if (
        not is_array_aval(aval)
        or np.ndim(value)
        or jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)
    ):
        return value
    number = np.asarray(value).item() if aval.weak_type else None
    if number is not None and jax.dtypes.canonicalize_dtype(np.result_type(number)) == aval.dtype:
        return number
    array = np.asarray(value, aval.dtype)
    # A float0 literal stays an array, because JAX accepts no scalar of float0. Before JAX 0.10.2,
    # such a literal can reach a broadcast_in_dim.
    return array if aval.dtype == jax.dtypes.float0 else array[()]


_STAGED = "jax.interpreters.partial_eval.DynamicJaxprTracer"


def is_staged(x: Any) -> bool:
    """Returns whether a value is a tracer of a trace that writes a jaxpr: of `jit` or a loop."""
    return isinstance(x, private(_STAGED) or ())


def is_computed_now(x: Any) -> bool:
    """Returns whether a value is an array, or a tracer of eager transformations around one."""
    while isinstance(x, Tracer) and not is_staged(x):
        inside = getattr(x, "primal", getattr(x, "val", None))
        if inside is None:
            return False  # a tracer of an unknown transformation
        x = inside
    return not isinstance(x, Tracer)


def is_in_eager_shard_map(x: Any) -> bool:
    """Returns whether a value is a shard of an array in a ``shard_map`` outside of any ``jit``.

    JAX 0.10 to 0.12 refuse rules with symbolic zeros there. No rule is needed, because nothing is
    differentiated there.
    """
    while type(x).__name__ == "BatchTracer":
        x = x.val
    return type(x).__name__ == "ShardMapTracer"


def traced_variable(x: Any) -> Var | None:
    """Returns the variable of a jaxpr behind a tracer; None for any other value.

    The trace of the tracer may have ended.
    """
    atom = x.val if is_staged(x) else None
    return atom if isinstance(atom, Var) else None
