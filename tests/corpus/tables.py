"""Where the programs come from, second part: tables of programs that stand in the test modules.

As in `sources`, each source imports what it needs itself; the names of the tables are the tests'.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import CastPolicy, Decision

from .program import FEW, Program, given, of_table, plain_policy, rotated


def torch_rows() -> Iterator[Program]:
    """PyTorch's lists, op by op, and what its fused operations get right."""
    from .. import test_torch_hazards as hazards, test_torch_lists as lists
    from ..jaxprs import through_a_dot
    from ..test_torch_promote import PROMOTE, ROUNDED_ON_RETURN, UNLISTED
    from ..test_torch_semantics import USES
    from ..torch_ops import arrays, normal

    def after_a_dot(fn: Any) -> Any:
        return lambda *xs: fn(*map(through_a_dot, xs))

    def low_first(fn: Any) -> Any:
        return lambda x, *xs: fn(through_a_dot(x), *xs)

    found: list[tuple[str, Any, Any]] = []
    for row in lists.LOW:
        found.append((f"low {row.op}", row.fn, arrays(row.shapes)))
    for row in lists.ALL_FULL:
        found.append((f"full {row.op}", after_a_dot(row.fn), arrays(row.shapes)))
    for row in PROMOTE:
        found.append((f"promote {row.op}", low_first(row.fn), arrays(row.shapes)))
    for name, fn in (UNLISTED | ROUNDED_ON_RETURN).items():
        found.append((f"unlisted {name}", after_a_dot(fn), arrays(((4,),))))
    p, x = {"w": normal(4, 4), "b": normal(4, seed=1)}, normal(4, 4, seed=2)
    for fn in hazards.LAYERS:
        found.append((f"layer {fn.__name__}", fn, (p, x)))
    for fn in hazards.NORMS:
        found.append((f"norm {fn.__name__}", after_a_dot(fn), (x,)))
    for name, fn in hazards.SCALARS.items():
        found.append((f"scalar {name}", after_a_dot(fn), (x,)))
    for name, fn in hazards.TYPED.items():
        found.append((f"typed {name}", low_first(fn), (x, x.T)))
    for name, fn in USES.items():
        found.append((f"uses {name}", fn, (normal(3, 3), normal(2, 3, seed=1))))
    params = {f"low {row.op}": {"params": row.params} for row in lists.LOW}
    for index, (name, fn, args) in enumerate(found):
        settings = rotated(index, 3)
        yield given(name, fn, *args, settings=settings, options=params.get(name, {}))


# --- what the planner decides ---------------------------------------------------------------------


def planning() -> Iterator[Program]:
    """Carries, constants, coordinates, causes, residual sums."""
    from .. import (
        test_carries as carries,
        test_compiler_autodiff as autodiff,
        test_guards as guards,
        test_levels as levels,
        test_links as links,
        test_loop_constants as loops,
        test_residuals as residuals,
    )
    from ..plans import LOWEST, low, positions

    first = {"options": {"params": 0}}
    yield from of_table(carries.CARRIES, carries.W, carries.X, prefix="carry ", **first)
    yield from of_table(carries.BEYOND, carries.W, carries.X, prefix="carry ", **first)
    for value in (65504.0, 65520.0, 1e-8, 1e-41, 1 - 1e-7, LOWEST, -3.38e38, np.inf, np.nan, 0.1):
        yield given(f"literal {value}", low(lambda h, v=value: h + v), guards.X)
        yield given(f"where {value}", low(lambda h, v=value: jnp.where(h > 0, h, v)), guards.X)
        constant = np.triu(np.full((4, 4), value, np.float32))
        yield given(f"constant {value}", low(lambda h, c=constant: h + jnp.asarray(c)), guards.X)
        yield given(f"product {value}", lambda x, c=constant: x @ jnp.asarray(c), guards.X)
    yield from of_table(guards.COORDINATES, guards.X, prefix="coordinates ")
    for n in (3, 256, 2048):
        yield given(f"positions {n}", positions(n), guards.X)
    for name, make in loops.MAKERS.items():
        yield given(f"loop {name}", loops.loop_over(make[0]), loops.W, loops.XS[:8])
    ones = np.ones((1, 1), np.float32)
    yield from of_table(loops.SIGMOIDS, ones, ones, prefix="sigmoid ")
    for (name, angles), (kind, where) in itertools.product(
        autodiff.ANGLES.items(), autodiff.POSITIONS.items()
    ):
        ids, rates = np.arange(65_530, 65_538, dtype=np.int32), np.ones(4, np.float32) / 3
        fn = lambda f, ids, a=angles, w=where: jnp.sin(a(w(ids), f)) @ f[:, None]
        yield given(f"angles {name} {kind}", fn, rates, ids)
    yield from of_table(links.CAUSES, links.W, links.X, prefix="cause ")
    yield given("block", levels.block, levels.W, levels.X)
    yield given("dense", residuals.dense, residuals.PARAMS, residuals.X)
    yield given("deep", residuals.deep, residuals.PARAMS, residuals.X)


def compilers() -> Iterator[Program]:
    """Small programs in the manner of the compilers' own tests."""
    from .. import (
        test_compiler_autodiff as autodiff,
        test_compiler_grappler as grappler,
        test_compiler_onnx as onnx,
        test_compiler_relay as relay,
    )
    from ..compiler_programs import KERNEL, X, affine, conv, of, relu, silu, softmax

    w = of(6, 6) / 2
    yield given("affine", lambda x, k, s: relu(affine(conv(x, k), s, s)), X, KERNEL, of(4))
    yield given("softmax", lambda x, k: softmax(conv(x, k)), X, KERNEL)
    yield given("gate", lambda x, k: silu(conv(x, k)) * (conv(x, k) + x), X, KERNEL)
    yield from of_table(grappler.LOW_PROGRAMS, w, of(6, 6), prefix="dense ")
    declared = (jnp.asarray(w, "bfloat16"), jnp.asarray(of(6, 6), "bfloat16"))
    yield from of_table(grappler.LOW_PROGRAMS, *declared, prefix="declared in bfloat16 ")
    for name, (x, to_float) in grappler.NUMBERS.items():
        yield given(f"numbers {name}", lambda w, x, f=to_float: (f(x) @ w, f(x) @ w.T), w, x)
    yield from of_table(relay.UNCHANGED, w, prefix="unchanged ")
    for name, args in onnx.EMPTY.items():
        yield given(f"empty {name}", lambda x, w: relu(x @ w + jnp.zeros(w.shape[-1])) / 2, *args)
    y = (np.arange(6) % 2).astype(np.float32)[:, None]
    for name, entropy in autodiff.BINARY_CROSS_ENTROPY.items():
        fn = lambda w, x, e=entropy: e(jax.nn.sigmoid(x @ w), y)
        yield given(f"entropy {name}", fn, of(4, 1), of(6, 4))
    for name, apply in autodiff.MASKS.items():
        fn = lambda w, x, a=apply: softmax(a(x @ w @ x.T, np.tri(6, dtype=bool))) @ x
        yield given(f"mask {name}", fn, w, w)
    for name, fn in autodiff.BATCHED.items():
        vmap = lambda f: jax.vmap(f, (None, 0))
        args = {"w": w, "b": of(6)}, of(3, 4, 6)
        yield given(f"vmap of cast {name}", fn, *args, around=vmap)
        yield given(f"cast of vmap {name}", vmap(fn), *args)


def policies() -> Iterator[Program]:
    """One network under rules, scopes and the other options of a policy."""
    from ..test_compiler_onnx import SCOPES, named_network
    from ..test_dot_output import PROGRAMS
    from ..test_html_report import PARAMS, X, looped, transformer
    from ..test_loop_constants import MAKERS, XS, W, loop_over

    consumer = functools.partial(plain_policy, dot_output="consumer")
    for name, (fn, w, x, _) in PROGRAMS.items():
        yield given(f"accumulator {name}", fn, w, x, policy=consumer)
    for name, make in MAKERS.items():
        yield given(f"accumulator loop {name}", loop_over(make[0]), W, XS[:8], policy=consumer)
    yield given("accumulator transformer", transformer, PARAMS, X, policy=consumer)
    yield given("transformer", transformer, PARAMS, X)
    yield given("looped", looped, PARAMS, X, forward_mode=True)
    rules: dict[str, Any] = {
        f"{primitive} {rule.value}": {primitive: rule}
        for primitive in ("dot_general", "exp", "tanh", "add")
        for rule in CastPolicy
    }
    rules["dot_general by size"] = {
        "dot_general": lambda eqn: (
            CastPolicy.FP32 if eqn.flops < 600 else CastPolicy.LOWER_PRECISION_FP
        )
    }
    rules["exp narrowed"] = {
        "exp": lambda eqn: Decision(policy=CastPolicy.FP32, output_dtype=jnp.bfloat16)
    }
    for index, (name, rule) in enumerate(rules.items()):
        of_rules = lambda setting, r=rule: plain_policy(setting).with_rules(r)
        yield given(
            f"rule {name}", transformer, PARAMS, X, policy=of_rules, settings=rotated(index, 2)
        )
    scoped = lambda setting: plain_policy(setting).with_rules({"tanh": "fp32"}, scope="*mlp")
    yield given("rule in a scope", transformer, PARAMS, X, policy=scoped)
    for name, (scopes, _) in SCOPES.items():
        of_scopes = lambda setting, s=scopes: plain_policy(setting).with_scopes(s)
        args = W[:6, :6], np.ones((6, 6), np.float32)
        yield given(f"scopes {name}", named_network, *args, policy=of_scopes)
    for pattern in ("*attention", "layers", "*/nowhere"):
        of_scope = lambda setting, p=pattern: plain_policy(setting).with_scopes({p: "float32"})
        yield given(f"scope {pattern}", transformer, PARAMS, X, policy=of_scope)


# --- structures and transformations ---------------------------------------------------------------


def structures() -> Iterator[Program]:
    """Loops, branches and calls in one another, callbacks, parameters that must survive."""
    from .. import test_edges_outside as outside, test_structural_metadata as metadata
    from ..test_structural import NESTED, REVERSE_ONLY, STRUCTURES, compose, inputs, params

    # A loop of unknown length has no gradient, a rule for gradients has no tangent.
    for names in [*((name,) for name in STRUCTURES), *NESTED]:
        forward_mode = "while" in names and not REVERSE_ONLY & set(names)
        fn = compose(*names)
        yield given(" ".join(names), fn, params(), inputs(), forward_mode=forward_mode)
    for name in "donating a_name_of_its_own scans remats branches".split():
        yield given(name, getattr(metadata, name), metadata.X)
    for name, kind in itertools.product(outside.STRUCTURES, ("pure", "io", "debug")):
        fn = outside.STRUCTURES[name](getattr(outside.Seen(), kind))
        derive = None if kind == "debug" else ()  # JAX cannot differentiate the others
        yield given(f"{kind} callback in {name}", fn, outside.X, settings=FEW, derive=derive)


def transformed() -> Iterator[Program]:
    """Transformations of cast functions, and casts of transformed functions."""
    from .. import test_composition as composition, test_leaf_views as views
    from ..values import normal

    args = composition.params(), composition.inputs()
    for name, (transform, fn, derivative) in composition.TRANSFORMS.items():
        options = {"settings": FEW, "forward_mode": derivative is composition.jvp}
        yield given(f"{name} of cast", fn, *args, around=transform, **options)
        yield given(f"cast of {name}", transform(fn), *args, **options)
    rows = normal(0, xs=(6, 1, 2))["xs"]
    small = views.LOOPS.keys() - {"fori", "nested_scan"}  # those have a length of their own
    loops = {name: views.loss_of(views.LOOPS[name]) for name in sorted(small)}
    yield from of_table(loops, views.params(), rows, prefix="weight in ")
    for name, move in views.MOVES.items():
        loop = views.scan_with(lambda w, x, m=move: views.use(m(w), x))
        yield given(f"moved in the loop {name}", views.loss_of(loop), views.params(), rows)
        once = lambda w, xs, m=move: views.LOOPS["scan"](m(w), xs)
        yield given(f"moved before the loop {name}", views.loss_of(once), views.params(), rows)
    for name, transform in views.COMPOSED.items():
        x = np.ones((3, 1, 2), np.float32)
        yield given(name, views.quadratic, views.params(), x, around=transform)
    shapes = {"w": (3, 4), "v": (4, 4)}
    tied = lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]) @ p["v"].T
    yield given("tied", tied, normal(2, **shapes), np.ones((2, 3), np.float32))


def custom_rules() -> Iterator[Program]:
    """Derivative and batching rules of the user's own."""
    from .. import test_custom_batching as batching, test_custom_rules as rules

    for (name, rule), (wrapping, around) in itertools.product(
        rules.RULES.items(), rules.WRAPPINGS.items()
    ):
        fn = rules.total(rule)
        yield given(f"{wrapping} of cast {name}", fn, rules.w(), rules.x(), around=around)
        yield given(f"cast of {wrapping} {name}", around(fn), rules.w(), rules.x(), settings=FEW)
    for (name, fn), axes in itertools.product(batching.PROGRAMS.items(), batching.AXES):
        vmap = lambda f, axes=axes: jax.vmap(f, axes)
        yield given(f"vmap {axes} {name}", fn, *batching.arguments(axes), around=vmap, settings=FEW)


def symbolic_sizes() -> Iterator[Program]:
    """Programs of symbolic dimensions."""
    from ..test_edges_export import PROGRAMS, symbolic

    for name, (fn, shapes) in PROGRAMS.items():
        yield Program(name, lambda f=fn, s=shapes: (f, symbolic(s)))


def sharded() -> Iterator[Program]:
    """Programs of several devices: mapped ones, and those with explicit mesh axes."""
    from jax.sharding import AxisType

    from .. import test_composition_sharding as sharding

    for name, reduce in sharding.COLLECTIVES.items():
        program = lambda w, x, r=reduce: r(sharding.forward(w, x))
        specs = {"out_specs": jax.sharding.PartitionSpec("data", None), "check_vma": False}
        around = lambda f, s=specs: sharding.collective(f, **s)
        build = lambda p=program: (p, sharding.arguments(sharding.mesh(AxisType.Auto)))
        yield Program(f"collective {name}", build, around=around)
        mapped = lambda p=program, a=around: (
            a(p),
            sharding.arguments(sharding.mesh(AxisType.Auto)),
        )
        yield Program(f"cast of collective {name}", mapped)
    explicit = lambda: jax.set_mesh(sharding.mesh(AxisType.Explicit))
    build = lambda: (
        sharding.explicit_forward,
        sharding.arguments(sharding.mesh(AxisType.Explicit)),
    )
    yield Program("explicit mesh axes", build, context=explicit)


SOURCES = (
    torch_rows,
    planning,
    compilers,
    policies,
    structures,
    transformed,
    custom_rules,
    symbolic_sizes,
    sharded,
)
