"""Operations with functions in them: loops, branches, calls, derivatives, batching, sharding."""

from __future__ import annotations

import dataclasses

from .generator import FLOATS, Draw, Generator, NoOperand, operation
from .program import ArrayType


def _strong(t: ArrayType) -> ArrayType:
    return dataclasses.replace(t, weak=False)


def _carry(g: Generator) -> str:
    """A value to carry: strongly typed, or the loop's carry would change its type."""
    return g.floats(lambda t: not t.weak)


def _carries(g: Generator) -> list[str]:
    names = [_carry(g)]
    if g.chance(0.4):
        names.append(g.pick(lambda t: not t.weak and t.dtype != "key"))
    return names


def _tuple(names) -> str:
    return f"({' '.join(name + ',' for name in names)})"


def _types(g: Generator, names) -> list[ArrayType]:
    return [g.types[name] for name in names]


@operation("control", 3)
def scan(g: Generator) -> Draw:
    carries = _carries(g)
    xs = g.floats(lambda t: t.ndim > 0 and t.shape[0] > 0) if g.chance(0.7) else None
    types = _types(g, carries)
    row = [ArrayType(g.types[xs].shape[1:], g.types[xs].dtype)] if xs else []
    out = _strong(g.types[g.floats()])
    body, _ = g.define([*types, *row], [*types, out], g.integer(1, 3))
    n = len(carries)
    loop = f"{body.name}s"
    call = f"{body.name}(*c{', x' if xs else ''})"
    before = (f"{loop} = lambda c, x: (lambda r: (r[:{n}], r[{n}]))({call})",)
    options = g.choice(("", "", ", reverse=True", ", unroll=2"))
    length = "" if xs else f", length={g.integer(0 if g.chance(0.1) else 1, 4)}"
    rows = xs or "None"
    scanned = f"lax.scan({loop}, {_tuple(carries)}, {rows}{length}{options})"
    return Draw(f"(lambda r: (*r[0], r[1]))({scanned})", n + 1, (body,), before)


@operation("control", 1)
def fori(g: Generator) -> Draw:
    carries = _carries(g)
    types = _types(g, carries)
    body, _ = g.define([ArrayType((), "int32"), *types], types, g.integer(1, 3))
    stop = g.choice(("2", "3", "jnp.asarray(2)")) if not g.x64 else "jnp.asarray(2, 'int32')"
    start = "0" if not g.x64 else "jnp.asarray(0, 'int32')"
    one = len(carries) == 1
    call = f"{body.name}(i, *c)"
    step = f"lambda i, c: {f'({call},)' if one else call}"
    loop = f"lax.fori_loop({start}, {stop}, {step}, {_tuple(carries)}){'[0]' if one else ''}"
    return Draw(loop, len(carries), (body,))


@operation("control", 1)
def while_loop(g: Generator) -> Draw:
    carries = _carries(g)
    types = _types(g, carries)
    body, _ = g.define(types, types, g.integer(1, 2))
    n = len(carries)
    step = f"lambda c: (c[0] + 1, *({body.name}(*c[1:]){',' if n == 1 else ''}))"
    if n == 1:
        step = f"lambda c: (c[0] + 1, {body.name}(c[1]))"
    limit = g.choice(("c[0] < 3", "(c[0] < 3) & (jnp.sum(c[1]) < 10)"))
    looped = f"lax.while_loop(lambda c: {limit}, {step}, (0, {', '.join(carries)}))"
    return Draw(f"{looped}[1:]" if n > 1 else f"{looped}[1]", n, (body,))


@operation("control", 2)
def cond(g: Generator) -> Draw:
    operands = [g.floats() for _ in range(g.integer(1, 2))]
    first, results = g.define(_types(g, operands), None, g.integer(1, 3))
    results = [_strong(results[0])]
    second, _ = g.define(_types(g, operands), results, g.integer(0, 2))
    first = dataclasses.replace(first, name=f"{first.name}b")
    predicate = g.choice((f"jnp.sum({operands[0]}) > 0", f"jnp.any({operands[0]} > 0.5)", "True"))
    arguments = ", ".join(operands)
    if g.chance(0.3):
        third, _ = g.define(_types(g, operands), results, 1)
        index = g.choice((f"jnp.argmax({operands[0]})", "jnp.asarray(1)", "jnp.asarray(7)"))
        branches = f"[{first.name}, {second.name}, {third.name}]"
        return Draw(f"lax.switch({index}, {branches}, {arguments})", 1, (first, second, third))
    branches = f"{first.name}, {second.name}"
    return Draw(f"lax.cond({predicate}, {branches}, {arguments})", 1, (first, second))


def _called(g: Generator, results: bool = False, scope: str = ""):
    operands = [g.floats()]
    if g.chance(0.5):
        operands.append(g.pick(lambda t: t.dtype != "key"))
    types = _types(g, operands)
    wanted = [_strong(t) for t in types[:1]] if results else None
    body, _ = g.define(types, wanted, g.integer(1, 3), scope=scope)
    return body, operands


@operation("control", 2)
def call(g: Generator) -> Draw:
    body, operands = _called(g)
    around = g.choice(
        (
            "jax.jit({f})",
            "jax.jit({f}, inline=True)",
            "jax.checkpoint({f})",
            "jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)",
            "jax.checkpoint({f}, policy=jax.checkpoint_policies.nothing_saveable)",
            "jax.named_call({f}, name='layer')",
            "{f}",
        )
    ).format(f=body.name)
    return Draw(f"{around}({', '.join(operands)})", 1, (body,))


@operation("control", 1)
def called_twice(g: Generator) -> Draw:
    body, operands = _called(g, results=True)
    first = f"{body.name}j({', '.join(operands)})"
    second = f"{body.name}j({', '.join([first, *operands[1:]])})"
    return Draw(second, 1, (body,), (f"{body.name}j = jax.jit({body.name})",))


@operation("control", 1)
def scope(g: Generator) -> Draw:
    scopes = ["full_precision()", "compute_precision('bfloat16')", "jax.named_scope('layer')"]
    scopes += ["compute_precision('float16')"]
    body, operands = _called(g, scope=g.choice(scopes))
    return Draw(f"{body.name}({', '.join(operands)})", 1, (body,))


@operation("control", 0.5)
def nested_autocast(g: Generator) -> Draw:
    body, operands = _called(g)
    options = g.choice(("'bfloat16'", "'float16'", "enabled=False"))
    return Draw(f"autocast({body.name}, {options})({', '.join(operands)})", 1, (body,))


@operation("control", 1)
def custom_jvp(g: Generator) -> Draw:
    x = g.floats()
    body, _ = g.define([g.types[x]], [_strong(g.types[x])], g.integer(1, 3), captures=False)
    name = f"{body.name}c"
    before = (
        f"{name} = jax.custom_jvp({body.name})",
        f"{name}.defjvp(lambda p, t: ({name}(*p), (t[0] * 0.5).astype({name}(*p).dtype)))",
    )
    call = f"{name}({x})"
    # A second call has the same rule, of which JAX makes a new object.
    return Draw(f"{name}({call})" if g.chance(0.4) else call, 1, (body,), before)


@operation("control", 1)
def custom_vjp(g: Generator) -> Draw:
    x = g.floats(lambda t: t.dtype == "float32")
    y = g.like(x, other_shape=False)
    types = [_strong(t) for t in _types(g, [x, y])]
    body, _ = g.define(types, types[:1], g.integer(1, 3), captures=False)
    name = f"{body.name}c"
    save = g.choice(("(x, y)", "(jnp.tanh(x), y)", f"({body.name}(x, y), y)"))
    back = g.choice(("(r[0] * c, r[1] + c)", "(c, None)", "(jnp.where(r[0] > 0, c, 0.), c * r[1])"))
    before = (
        f"{name} = jax.custom_vjp({body.name})",
        f"{name}.defvjp(lambda x, y: ({body.name}(x, y), {save}), lambda r, c: {back})",
    )
    call = f"{name}({x}, {y})"
    return Draw(f"{name}({call}, {y})" if g.chance(0.4) else call, 1, (body,), before)


@operation("control", 1.5)
def batched(g: Generator) -> Draw:
    x = g.floats(lambda t: t.ndim > 0)
    axis = g.integer(0, g.types[x].ndim - 1)
    shape = g.types[x].shape[:axis] + g.types[x].shape[axis + 1 :]
    operands, axes = [x], [str(axis)]
    types = [ArrayType(shape, g.types[x].dtype)]
    if g.chance(0.5):
        operands.append(g.floats())
        axes.append("None")
        types.append(g.types[operands[1]])
    body, _ = g.define(types, None, g.integer(1, 3))
    mapped = f"jax.vmap({body.name}, in_axes=({', '.join(axes)},))"
    if len(axes) == 1 and axis == 0 and g.chance(0.2):
        mapped = f"(lambda x: lax.map({body.name}, x))"
    return Draw(f"{mapped}({', '.join(operands)})", 1, (body,))


@operation("control", 0.7)
def sharded(g: Generator) -> Draw:
    x = g.floats(lambda t: t.ndim > 0 and t.shape[0] > 0)
    body, _ = g.define([g.types[x]], [_strong(g.types[x])], g.integer(1, 3), captures=False)
    spec = g.choice(("P('i')", "P()"))
    inner = body.name
    if g.chance(0.5):
        collective = g.choice(("lax.psum", "lax.pmean", "lax.pmax", "lax.psum"))
        inner = f"(lambda x: {body.name}(x) + {collective}(x * 1, 'i'))"
    mesh = (
        "jax.make_mesh((1,), ('i',), axis_types=(jax.sharding.AxisType.Auto,), "
        "devices=jax.devices()[:1])"
    )
    mapped = f"jax.shard_map({inner}, mesh={mesh}, in_specs={spec}, out_specs={spec})"
    return Draw(f"{mapped}({x})", 1, (body,))


@operation("control", 1)
def derivative(g: Generator) -> Draw:
    """A gradient, a tangent or a pullback in the program."""
    x = g.floats(lambda t: t.dtype == "float32")
    body, _ = g.define([_strong(g.types[x])], None, g.integer(1, 3), captures=g.chance(0.5))
    return Draw(
        g.choice(
            (
                f"jax.grad(lambda x: jnp.sum({body.name}(x)).astype('float32'))({x})",
                f"jax.jvp({body.name}, ({x},), ({x},))[1]",
                f"jax.value_and_grad(lambda x: jnp.mean({body.name}(x)).astype('float32'))({x})[1]",
                f"jax.vjp({body.name}, {x})[1](jnp.ones_like({body.name}({x})))[0]",
                f"jax.linearize({body.name}, {x})[1]({x})",
                f"jax.jacfwd({body.name})({x})",
            )
        ),
        1,
        (body,),
    )


@operation("control", 0.4)
def associative_scan(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0 and t.shape[0] > 1)
    op = g.choice(("jnp.add", "jnp.multiply", "jnp.maximum", "lambda a, b: a + b * 0.5"))
    return f"lax.associative_scan({op}, {x})"


@operation("control", 0.4)
def loop_of_products(g: Generator) -> str:
    """A recurrence whose carry may run in 16 bits."""
    x = g.floats(lambda t: t.ndim == 2 and t.shape[0] == t.shape[1] and not t.weak)
    last = g.choice(("jnp.tanh({m})", "{m} / 4", "jax.nn.softmax({m})", "0.5 * (c + {m})"))
    step = last.format(m=f"(c @ {x})")
    return f"lax.scan(lambda c, _: ({step}, c.sum()), {x}, None, length={g.integer(1, 4)})[0]"


@operation("control", 0.3)
def iterated_solution(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim == 1 and 0 not in t.shape and t.dtype == "float32")
    solve = "lambda f, b: b / 2"
    return g.choice(
        (
            f"lax.custom_linear_solve(lambda v: 2 * v, {x}, {solve}, transpose_solve={solve})",
            f"lax.custom_root(lambda v: v ** 3 + v - {x}, {x}, lambda f, v: lax.fori_loop("
            f"0, 3, lambda _, u: u - f(u) / 4, v), lambda f, b: b / f(jnp.ones_like(b)))",
        )
    )


@operation("control", 0.3)
def custom_batching(g: Generator) -> Draw:
    x = g.floats(lambda t: not t.weak)
    body, _ = g.define([g.types[x]], [g.types[x]], g.integer(1, 2), captures=False)
    name = f"{body.name}v"
    before = (
        f"{name} = jax.custom_batching.custom_vmap({body.name})",
        f"{name}.def_vmap(lambda n, b, x: (jax.vmap({body.name})(x), True))",
    )
    call = f"{name}({x})"
    # A second call has the same rule, of which JAX makes a new object.
    return Draw(f"{name}({call})" if g.chance(0.4) else call, 1, (body,), before)


@operation("library")
def callback(g: Generator) -> str:
    x = g.floats(lambda t: t.dtype in FLOATS[:1])
    result = f"jax.ShapeDtypeStruct({x}.shape, {x}.dtype)"
    function = "lambda x: -np.asarray(x)"
    return f"jax.pure_callback({function}, {result}, {x}, vmap_method='expand_dims')"


@operation("library")
def mutable(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0 and t.shape[0] > 0 and not t.weak)
    return f"(lambda r: (r.__setitem__(0, r[0] * 2), jax.freeze(r))[1])(jax.new_ref({x}))"


@operation("library", 2)
def layer(g: Generator) -> str:
    """What a network does, written out with operands at hand."""
    x = g.floats(lambda t: t.ndim == 2 and 0 not in t.shape)
    try:
        w = g.pick(lambda t: t.dtype == g.types[x].dtype and t.shape == g.types[x].shape[::-1])
    except NoOperand:
        w = f"{x}.T"
    return g.choice(
        (
            f"{x} + jax.nn.gelu({x} @ {w}) @ {x}",
            f"jax.nn.softmax({x} @ {w}) @ {x}",
            f"jnp.mean(jnp.square({x} @ {w} - 1.))",
            f"-jnp.mean(jax.nn.log_softmax({x} @ {w})[:, 0])",
            f"jax.nn.standardize({x} @ {w}) * 0.5 + 0.1",
            f"jnp.tanh({x} @ {w}) * jax.nn.sigmoid({x} @ {w})",
            f"({x} @ {w} > 0).astype({x}.dtype) @ {x}",
        )
    )
