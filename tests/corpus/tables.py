"""Where the programs come from, second part: tables of programs that stand in the test modules.

As in `sources`, each source imports what it needs itself; the names of the tables are the tests'.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .program import FEW, Program, given, of_table

# --- what the planner decides ---------------------------------------------------------------------


# --- structures and transformations ---------------------------------------------------------------


def structures() -> Iterator[Program]:
    """Loops, branches and calls in one another, callbacks, parameters that must survive."""
    from ..loops.test_structural import NESTED, REVERSE_ONLY, STRUCTURES, compose, inputs, params
    from ..rewrite import test_structural_metadata as metadata
    from ..transform import test_foreign_code as outside

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
    from ..derivatives import test_source_views as views
    from ..support.numerics import normal
    from ..transform import test_composition as composition

    args = composition.params(), composition.inputs()
    for name, (transform, fn, derivative) in composition.TRANSFORMS.items():
        options = {"settings": FEW, "forward_mode": derivative is composition.jvp}
        yield given(f"{name} of cast", fn, *args, around=transform, **options)
        yield given(f"cast of {name}", transform(fn), *args, **options)
    rows = normal(0, xs=(6, 1, 8))["xs"]
    small = views.LOOPS.keys() - {"fori", "nested_scan"}  # those have a length of their own
    loops = {name: views.loss_of(views.LOOPS[name]) for name in sorted(small)}
    yield from of_table(loops, views.params(), rows, prefix="weight in ")
    for name, move in views.MOVES.items():
        loop = views.scan_with(lambda w, x, m=move: views.use(m(w), x))
        yield given(f"moved in the loop {name}", views.loss_of(loop), views.params(), rows)
        once = lambda w, xs, m=move: views.LOOPS["scan"](m(w), xs)
        yield given(f"moved before the loop {name}", views.loss_of(once), views.params(), rows)
    for name, transform in views.COMPOSED.items():
        x = np.ones((3, 1, 8), np.float32)
        yield given(name, views.quadratic, views.params(), x, around=transform)
    shapes = {"w": (6, 8), "v": (8, 8)}
    tied = lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]) @ p["v"].T
    yield given("tied", tied, normal(2, **shapes), np.ones((2, 6), np.float32))


def custom_rules() -> Iterator[Program]:
    """Derivative and batching rules of the user's own."""
    from ..derivatives import test_custom_batching as batching, test_custom_rules as rules

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
    from ..transform.test_export import PROGRAMS, symbolic

    for name, (fn, shapes) in PROGRAMS.items():
        yield Program(name, lambda f=fn, s=shapes: (f, symbolic(s)))


def sharded() -> Iterator[Program]:
    """Programs of several devices: mapped ones, and those with explicit mesh axes."""
    from jax.sharding import AxisType

    from ..transform import test_composition_sharding as sharding

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
    structures,
    transformed,
    custom_rules,
    symbolic_sizes,
    sharded,
)
