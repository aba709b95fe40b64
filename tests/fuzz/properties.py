"""The promises that are checked on each program."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import Policy, autocast, keep_less
from jmp_autocast.interpreters.compat import name_stack
from tests.corpus.jaxpr_text import jaxpr_text
from tests.support.jaxprs import find, flat_emission

from .between_products import computed_low_without_a_product, replayed
from .comparison import Bound, Unsupported, as_numbers, compile_quickly, interpreted, run_as_traced
from .error_model import Precision
from .program import Program, jax_settings
from .segments import WRAPPERS, computed_in, difference, draw_segment, inline, without_dead

LOW = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Setting:
    """How `autocast` is called."""

    policy: Policy
    params: str = "auto"

    def text(self) -> str:
        p = self.policy
        policy = f"Policy({p.compute_dtype.name!r}, level={p.level!r})"
        return f"autocast(program, policy={policy}{', params=()' if self.params == 'none' else ''})"

    def options(self) -> dict[str, Any]:
        return {"policy": self.policy, **({"params": ()} if self.params == "none" else {})}


class Broken(Exception):
    """A promise does not hold."""


class Case:
    """A program with its arguments and setting, and what several properties need of it."""

    def __init__(self, program: Program, setting: Setting, args: tuple[Any, ...], rng: Any) -> None:
        self.program, self.setting, self.args, self.rng = program, setting, args, rng
        self.plain = program.function()
        self.cast = autocast(self.plain, **setting.options())
        dtypes = {np.dtype(setting.policy.compute_dtype).name}
        text = program.text()
        dtypes |= {d for d in ("bfloat16", "float16") if f"precision('{d}')" in text}
        dtypes |= {d for d in ("bfloat16", "float16") if f", '{d}')(" in text}
        self.precision = Precision(frozenset(dtypes), setting.policy.level)
        self.inner_gradient = any(s in text for s in ("jax.grad", "vjp", "linearize", "jac", "jvp"))
        if self.inner_gradient:
            self.precision = dataclasses.replace(self.precision, gradients=True)
        self.constrained: list[float] = []
        self._bound: Bound | None = None
        self._traced: Any = None
        self._plain_traced: Any = None

    def plain_traced(self) -> Any:
        if self._plain_traced is None:
            self._plain_traced = trace(self.plain, *self.args)
        return self._plain_traced

    def traced(self) -> Any:
        if self._traced is None:
            self._traced = trace(self.cast, *self.args)
        return self._traced

    def bound(self) -> Bound:
        if self._bound is None:
            self._bound = Bound(self.plain_traced().jaxpr, self.precision)
        return self._bound

    def close(self, bound: Bound, compute: Callable[[], Any], args: Any, what: str) -> None:
        bound.exact(args)  # before anything is said of autocast: does the plain program run?
        message, share = bound.check(compute(), args, self.rng)
        self.constrained += share
        if message:
            raise Broken(f"{what}: {message}")


def trace(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(lambda *a: fn(*a)).trace(*args)


def avals(traced: Any) -> list[tuple[Any, ...]]:
    return [_type(a) for a in traced.jaxpr.out_avals]


def _type(a: Any) -> tuple[Any, ...]:
    return (tuple(a.shape), str(a.dtype), bool(getattr(a, "weak_type", False)))


def _same_types(plain: list[Any], found: list[Any], what: str) -> None:
    if plain != found:
        wrong = [(i, p, f) for i, (p, f) in enumerate(zip(plain, found, strict=False)) if p != f]
        raise Broken(f"{what}: output, plain, found: {wrong or (len(plain), len(found))}")


@contextlib.contextmanager
def _of_plain(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the plain program raises is no fault of autocast
        raise Unsupported(f"{what}: {type(error).__name__}") from error


def types(case: Case) -> None:
    """The same shapes, dtypes and weak types as the plain function."""
    _same_types(avals(case.plain_traced()), avals(case.traced()), "types")


def values(case: Case) -> None:
    """Values within the error model's bound of float32's."""
    compute = lambda: interpreted(case.traced(), case.args)
    case.close(case.bound(), compute, case.args, "values")


def compiled(case: Case) -> None:
    """The same of what XLA makes of it."""

    def compute() -> Any:
        with _where_plain_compiles(case):
            return compile_quickly(case.traced())(*case.args)

    plain = lambda: run_as_traced(case.plain_traced(), case.args)
    _close_as_xla(case, compute, plain, "compiled")


def _close_as_xla(
    case: Case, compute: Callable[[], Any], compute_plain: Callable[[], Any], what: str
) -> None:
    """Close to the plain program, or XLA's result of that is no closer."""
    try:
        case.close(case.bound(), compute, case.args, what)
    except Broken:
        # XLA divides by 3e38 by multiplying with its reciprocal, which is 0 to it.
        if case.bound().check(compute_plain(), case.args, case.rng)[0]:
            raise Unsupported("XLA's result of the plain program is as wrong") from None
        raise


@contextlib.contextmanager
def _where_plain_compiles(case: Case) -> Iterator[None]:
    try:
        yield
    except Exception:  # raised again, unless the plain program fails as well
        with _of_plain("compiled"):
            compile_quickly(case.plain_traced())(*case.args)
        raise


def _loss(case: Case) -> tuple[Callable[[Callable[..., Any]], Callable[[Any], Any]], list[Any]]:
    """Returns a loss of the float inputs, for the plain function or another, and the inputs."""
    leaves, tree = jax.tree.flatten(case.args)
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, np.floating)]
    if not at:
        raise Unsupported("no float input")

    def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
        def loss(xs: Any) -> Any:
            full = list(leaves)
            for i, x in zip(at, xs, strict=True):
                full[i] = x
            outs = [o for o in fn(*jax.tree.unflatten(tree, full)) if hasattr(o, "dtype")]
            total = jnp.zeros((), jnp.float32)
            for k, o in enumerate(outs):
                if jnp.issubdtype(o.dtype, jnp.inexact) and o.dtype.itemsize > 1:
                    o = jnp.real(o).astype(jnp.float32)
                    total = total + jnp.sum(o * jnp.cos(jnp.arange(o.size) + k).reshape(o.shape))
            return total

        return loss

    return loss_of, [leaves[i] for i in at]


def gradients(case: Case) -> None:
    """Gradients with the parameters' types, finite where float32's are, and as close."""
    loss_of, primals = _loss(case)
    forms = ["outside", "inside", "jvp"]
    form = forms[int(case.rng.integers(3))]
    if _has_while(case):
        form = "jvp"
    if form == "jvp":
        derive = lambda f: lambda xs: jax.jvp(f, (xs,), (xs,))
    else:
        derive = lambda f: jax.value_and_grad(f)
    plain = derive(loss_of(case.plain))
    with _of_plain("gradient"):
        closed = jax.make_jaxpr(plain)(primals)
        expected = [_type(a) for a in closed.out_avals]
        bound = Bound(closed, dataclasses.replace(case.precision, gradients=True))
    if form == "inside":
        cast = autocast(plain, **case.setting.options())
    else:
        cast = derive(loss_of(case.cast))
    traced = trace(cast, primals)
    _same_types(expected, avals(traced), f"types of gradients ({form})")
    compute = lambda: interpreted(traced, primals)
    case.close(bound, compute, (primals,), f"gradients ({form})")


def _has_while(case: Case) -> bool:
    return any(name in case.program.text() for name in ("while_loop", "fori_loop"))


SAVEABLE = (
    None,
    jax.checkpoint_policies.nothing_saveable,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.everything_saveable,
)


def kept(case: Case) -> None:
    """What is computed again, and not kept, leaves gradients as they are.

    The order of a sum of cotangents may change: within the roundings of the program's own dtypes.
    """
    loss_of, primals = _loss(case)
    if _has_while(case):
        raise Unsupported("no gradient of a while loop")
    policy = SAVEABLE[int(case.rng.integers(len(SAVEABLE)))]
    user = (lambda f: f) if policy is None else lambda f: jax.checkpoint(f, policy=policy)
    derive = lambda fn: jax.value_and_grad(user(loss_of(fn)))
    with _of_plain("gradient"):
        trace(derive(case.plain), primals)
    if case.rng.random() < 0.5:
        plain, again = case.plain, keep_less(case.plain)
    else:
        plain, again = case.cast, keep_less(case.cast, residuals="recompute")
    try:
        plain, traced = (trace(derive(fn), primals) for fn in (plain, again))
    except TypeError as error:
        # A user's `checkpoint` that saves a complex value fails in JAX 0.10 to 0.12. Without the
        # `jit` around it, the value is one that `everything_saveable` of the user saves.
        if policy is None or "reduce_precision does not accept dtype complex" not in str(error):
            raise
        raise Unsupported("JAX saves no complex value") from error
    # Whether the gradient of a weakly typed number is one depends on which cotangent comes first.
    strong = ([(*t[:2], False) for t in avals(x)] for x in (plain, traced))
    _same_types(*strong, "types of gradients")
    compute = lambda: interpreted(traced, primals)
    case.close(Bound(plain.jaxpr, Precision(frozenset())), compute, (primals,), "kept")


def idempotent(case: Case) -> None:
    """`autocast` of `autocast` is one."""
    twice = trace(autocast(case.cast, **case.setting.options()), *case.args)
    once = case.traced()
    # Who shares a jaxpr with whom is no part of a program: a rule of an inner `autocast` is a
    # function of its own to the outer one.
    _same_text(once, twice, "idempotent", jaxpr_text)
    names = [set(re.findall(r"\bname=(\S+)", str(t.jaxpr))) for t in (once, twice)]
    if names[0] != names[1]:
        raise Broken(f"idempotent: functions named {names[0]}, then {names[1]}")


def deterministic(case: Case) -> None:
    """A second trace gives the same jaxpr, the same constants and the same values."""
    again = trace(autocast(case.program.function(), **case.setting.options()), *case.args)
    _same_text(case.traced(), again, "deterministic")
    with _where_plain_compiles(case):
        first, second = (compile_quickly(t)(*case.args) for t in (case.traced(), again))
    for i, (a, b) in enumerate(zip(map(as_numbers, first), map(as_numbers, second), strict=True)):
        if a.tobytes() != b.tobytes():
            raise Broken(f"deterministic: output {i} is {a}, then {b}")


def _same_text(
    first: Any,
    second: Any,
    what: str,
    text: Callable[[Any], str] = lambda traced: str(traced.jaxpr),
) -> None:
    if (a := text(first)) != (b := text(second)):
        raise Broken(f"{what}: jaxprs differ\n{a}\n--- and ---\n{b}")
    same = len(first.jaxpr.consts) == len(second.jaxpr.consts) and all(
        np.array_equal(as_numbers(x), as_numbers(y), equal_nan=as_numbers(x).dtype.kind in "fc")
        for x, y in zip(first.jaxpr.consts, second.jaxpr.consts, strict=True)
    )
    if not same:
        raise Broken(f"{what}: constants differ")


def without_jit(case: Case) -> None:
    """Called outside of ``jit`` it has the same types, and values that are as close."""
    with _of_plain("without jit"):
        case.plain(*case.args)
    # Traced, a float16 attention asks for an algorithm that XLA:CPU lacks, autocast or not.
    with _where_plain_compiles(case):
        found = case.cast(*case.args)
    plain = avals(case.plain_traced())
    _same_types(plain, [_type(jax.typeof(x)) for x in found], "without jit")
    _close_as_xla(case, lambda: found, lambda: case.plain(*case.args), "without jit")


def batched(case: Case) -> None:
    """``vmap`` and `autocast` commute."""
    axes = jax.tree.map(
        lambda x: None if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 0, case.args
    )
    if all(a is None for a in jax.tree.leaves(axes, is_leaf=lambda a: a is None)):
        raise Unsupported("nothing to batch")
    other = jax.tree.map(lambda x, a: x if a is None else _shuffled(x, case.rng), case.args, axes,
                         is_leaf=lambda a: a is None)  # fmt: skip
    rows = (case.args, other)
    both = jax.tree.map(
        lambda x, y: (
            x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.device_put(np.stack([x, y]))
        ),
        *rows,
    )
    with _of_plain("vmap"):
        plain = avals(trace(jax.vmap(case.plain, in_axes=axes), *both))
    case.bound().exact(case.args)  # does it run?
    outside = jax.vmap(case.cast, in_axes=axes)
    inside = autocast(jax.vmap(case.plain, in_axes=axes), **case.setting.options())
    for name, fn in (("vmap(autocast)", outside), ("autocast(vmap)", inside)):
        traced = trace(fn, *both)
        _same_types(plain, avals(traced), name)
        found = interpreted(traced, both)
        for i, row in enumerate(rows):
            rows_of = lambda i=i, found=found: [x[i] for x in found]
            case.close(case.bound(), rows_of, row, f"{name}, row {i}")


def _shuffled(x: Any, rng: Any) -> Any:
    """Other values of the same type: the same elements in another order, negated at random."""
    numbers = np.asarray(x)
    found = numbers.ravel()[rng.permutation(x.size)].reshape(x.shape) if x.size else numbers
    return -found if jnp.issubdtype(x.dtype, np.floating) and rng.random() < 0.5 else found


def disabled(case: Case) -> None:
    """With ``enabled=False`` the program is the plain one."""
    found = trace(autocast(case.plain, enabled=False), *case.args)
    _same_text(case.plain_traced(), found, "disabled")


def untouched(case: Case) -> None:
    """What is neither float32 nor 16 bits is cast where the program casts it, and only there."""
    if "autocast(" in case.program.text():
        raise Unsupported("an inner autocast casts, too")
    plain, found = (_foreign_casts(t.jaxpr) for t in (case.plain_traced(), case.traced()))
    if plain != found:
        raise Broken(f"untouched: casts {plain}, then {found}")


def _foreign_casts(jaxpr: Any) -> collections.Counter[tuple[str, str]]:
    """Casts from or to a dtype that autocast never touches; a float32 or 16-bit end is "float"."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for eqn in find(jaxpr, "convert_element_type"):
        names = (str(eqn.invars[0].aval.dtype), str(eqn.outvars[0].aval.dtype))
        source, target = ("float" if n in ("float32", *LOW) else n for n in names)
        # A number cast to float may be cast to two of them.
        if source != target and not (
            source.startswith(("bool", "int", "uint")) and target == "float"
        ):
            counts[source, target] += 1
    return counts


def between_products(case: Case) -> None:
    """An equation computes in 16 bits only if a product consumes its result.

    What leads to no product is, op by op, what float32 computes of the rounded products.
    """
    plain, cast = case.plain_traced().jaxpr, case.traced().jaxpr
    if "f16[" in str(plain) or "autocast(" in case.program.text():
        raise Unsupported("16 bits of the program's own")
    if wrong := computed_low_without_a_product(cast):
        raise Broken(f"between_products: {wrong[:3]} in\n{cast}")
    if "precision(" in case.program.text():
        return
    # A program may compare NaNs, or take the jvp of a custom_vjp, which JAX traces but cannot run.
    with np.errstate(invalid="ignore"), _where_plain_compiles(case):
        outputs = list(replayed(plain, cast, jax.tree.leaves(case.args)))
    for i, want, got in outputs:
        if not _equal(want, got):
            raise Broken(f"between_products: output {i} is {got}, float32 computes {want}\n{cast}")


def _equal(want: Any, got: Any) -> bool:
    if not jnp.issubdtype(want.dtype, jnp.inexact):  # keys, too
        return bool((want == got).all())
    # NumPy takes the NaNs of the small float dtypes for unequal.
    wide = np.float32 if want.dtype.kind == "V" else want.dtype
    return np.array_equal(want.astype(wide), got.astype(wide), equal_nan=True)


def leaks(case: Case) -> None:
    """No tracer outlives the trace."""
    with jax.checking_leaks():
        with _of_plain("leaks"):
            trace(case.plain, *case.args)
        trace(case.cast, *case.args)


@dataclasses.dataclass(frozen=True)
class Flat:
    """A program of a case as a jaxpr: the plain one, or one with its gradient."""

    closed: Any
    leaves: list[Any]
    is_param: list[bool]
    options: dict[str, Any]

    def arguments(self) -> tuple[list[Any], list[Any]]:
        """The parameters, and the data."""
        pairs = list(zip(self.leaves, self.is_param, strict=True))
        return [x for x, param in pairs if param], [x for x, param in pairs if not param]

    def of_arguments(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of parameters and data, of one of the leaves."""

        def of_both(params: list[Any], data: list[Any]) -> Any:
            both = {True: iter(params), False: iter(data)}
            return fn(*(next(both[param]) for param in self.is_param))

        return of_both

    def plain(self, fn: Callable[..., Any]) -> Any:
        return trace(self.of_arguments(fn), *self.arguments())

    def cast(self, fn: Callable[..., Any]) -> Any:
        cast = autocast(self.of_arguments(fn), **{**self.options, "params": (0,)})
        return trace(cast, *self.arguments())

    def swapped(self) -> Flat:
        """What were parameters are data, and the other way round."""
        return dataclasses.replace(self, is_param=[not param for param in self.is_param])


def _flat(case: Case) -> Flat:
    leaves = jax.tree.leaves(case.args)
    count = 0 if case.setting.params == "none" else len(jax.tree.leaves(case.args[0]))
    is_param = [k < count for k in range(len(leaves))]
    closed = case.plain_traced().jaxpr
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, np.floating)]
    if floats and case.rng.random() < 0.3 and not _has_while(case):
        loss_of, leaves = _loss(case)
        with _of_plain("gradient"):
            closed = jax.make_jaxpr(jax.value_and_grad(loss_of(case.plain)))(leaves)
        is_param = [is_param[i] for i in floats]
    return Flat(without_dead(closed), leaves, is_param, case.setting.options())


def calls(case: Case) -> None:
    """A segment in a call, a checkpoint or a custom rule changes nothing.

    Neither a dtype nor, evaluated op by op, a bit of the result. Casts at the border and what moves
    elements may stand outside.
    """
    flat = _flat(case)
    segment = draw_segment(flat.closed, case.rng)
    if segment is None:
        raise Unsupported("no segment to call")
    name = list(WRAPPERS)[int(case.rng.integers(len(WRAPPERS)))]
    forms = [segment.program(segment.call(wrap)) for wrap in (inline, WRAPPERS[name])]
    with _of_plain("calls"):
        plain = [avals(flat.plain(fn)) for fn in forms]
    if plain[0] != plain[1]:
        raise Unsupported("other weak types")
    programs = [flat.cast(fn) for fn in forms]
    where = f"equations {segment.start} to {segment.stop - 1} in {name}"
    if text := difference(*(computed_in(t.jaxpr) for t in programs)):
        raise Broken(f"calls: other dtypes with {where}\n{text}")
    try:
        results = [interpreted(t, flat.arguments()) for t in programs]
    except (NotImplementedError, TypeError):
        with _of_plain("calls"):  # what no rule evaluates op by op
            interpreted(flat.plain(forms[0]), flat.arguments())
        raise
    _same_bits(*results, f"calls, {where}")


def _same_bits(first: list[Any], second: list[Any], what: str) -> None:
    pairs = zip(map(as_numbers, first), map(as_numbers, second), strict=True)
    for i, (a, b) in enumerate(pairs):
        if not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            raise Broken(f"{what}: output {i} is {a.ravel()[:4]}, then {b.ravel()[:4]}")


def history(case: Case) -> None:
    """Two programs have equal plans together, apart, in the other order and in threads.

    They share a function, which they call with parameters and data exchanged.
    """
    flat = _flat(case)
    segment = draw_segment(flat.closed, case.rng)
    if segment is None:
        raise Unsupported("no segment to call")
    fn = segment.program(segment.call(jax.jit))
    pair = flat, flat.swapped()
    apart = [part.cast(fn) for part in pair]
    expected = sum(
        (collections.Counter(computed_in(t.jaxpr)) for t in apart), collections.Counter()
    )
    for parts in (pair, pair[::-1]):
        count = len(flat.leaves)
        both = dataclasses.replace(
            flat,
            leaves=[x for part in parts for x in part.leaves],
            is_param=[param for part in parts for param in part.is_param],
        )
        together = both.cast(lambda *xs, n=count: [*fn(*xs[:n]), *fn(*xs[n:])])
        if (found := collections.Counter(computed_in(together.jaxpr))) != expected:
            raise Broken(f"history: apart {expected - found}, together {found - expected}")
    texts = [jaxpr_text(t.jaxpr) for t in apart]

    def in_thread(part: Flat) -> str:
        with jax_settings(case.program.x64):
            return jaxpr_text(part.cast(fn).jaxpr)

    with concurrent.futures.ThreadPoolExecutor(len(pair)) as pool:
        for text, found in zip(texts, pool.map(in_thread, pair), strict=True):
            if text != found:
                raise Broken(f"history: in threads\n{text}\n--- and ---\n{found}")


def repeats(case: Case) -> None:
    """Lines that recur are emitted as if each equation was bound by itself."""

    def program(*args: Any) -> Any:
        return [case.plain(*args) for _ in range(7)]

    with _of_plain("repeats"):
        trace(program, *case.args)
    cast = lambda: trace(autocast(program, **case.setting.options()), *case.args)
    outlined = cast()
    with flat_emission():
        flat = cast()
    _same_text(flat, outlined, "repeats")
    stacks = [[name_stack(e) for e in t.jaxpr.eqns] for t in (flat, outlined)]
    if stacks[0] != stacks[1]:
        raise Broken(f"repeats: names {stacks[0]}, then {stacks[1]}")


PROPERTIES: dict[str, Callable[[Case], None]] = {
    "types": types,
    "values": values,
    "gradients": gradients,
    "kept": kept,
    "idempotent": idempotent,
    "batched": batched,
    "compiled": compiled,
    "disabled": disabled,
    "untouched": untouched,
    "between_products": between_products,
    "leaks": leaks,
    "deterministic": deterministic,
    "without_jit": without_jit,
    "calls": calls,
    "history": history,
    "repeats": repeats,
}

# How many of the programs each is checked on: what compiles or traces a lot is rarer.
SHARES = {
    "types": 1.0,
    "values": 0.7,
    "gradients": 0.25,
    "kept": 0.25,
    "idempotent": 0.15,
    "batched": 0.1,
    "compiled": 0.08,
    "disabled": 0.1,
    "untouched": 0.3,
    "between_products": 0.3,
    "leaks": 0.05,
    "deterministic": 0.05,
    "without_jit": 0.03,
    "calls": 0.3,
    "history": 0.1,
    "repeats": 0.1,
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A promise that does not hold for a program."""

    property: str
    message: str


def check(case: Case, names: tuple[str, ...]) -> tuple[list[Failure], list[str]]:
    """Returns the failures, and the properties that the plain program has no form for."""
    failures, without = [], []
    for name in names:
        try:
            with warnings.catch_warnings(), jax_settings(case.program.x64):
                warnings.simplefilter("error")
                PROPERTIES[name](case)
        except Unsupported:
            without.append(name)
        except Broken as broken:
            failures.append(Failure(name, str(broken)))
        except Exception as error:  # any error of autocast is a finding
            failures.append(Failure(name, f"{type(error).__name__}: {error}"))
    return failures, without
