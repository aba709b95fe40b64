"""Random programs for property tests: a program is data, so hypothesis can shrink it.

A program is a list of steps ``(operation, a, b, c, body)``. It runs on a growing list of values;
the numbers choose operands among the values that an operation can take. The choice looks at shapes
and dtypes alone, so that a program is the same whenever it is traced.
"""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp_autocast import autocast, compute_precision, full_precision

SHAPES = [(), (1,), (3,), (0,), (2, 3), (3, 2), (3, 3), (2, 0), (2, 3, 3)]
DTYPES = ["float32", "float16", "bfloat16", "int32", "bool", "complex64"]
HALF = float(np.finfo(np.float16).max)
NUMBERS = [0.0, 1.0, -1.0, 0.5, 1e-8, 6e-8, 6.1e-5, 1 - 1e-7, 1.0002, HALF, HALF + 16, 7e4, 257.0]
NUMBERS += [2049.0, 3e38, float(np.finfo(np.float32).min), 1e-45, np.inf, -np.inf, np.nan]


def promoted(*values):
    """The values in one dtype, as JAX's own promotion gives where it is not strict."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = functools.reduce(jnp.promote_types, [v.dtype for v in values])
    return tuple(v.astype(dtype) for v in values)


def kind(x):
    return {"float": "f", "bfloat": "f", "int": "i", "bool": "b", "complex": "c"}[
        jnp.dtype(x.dtype).name.rstrip("0123456789")
    ]


def is_float(x):
    return kind(x) == "f"


def is_number(x):
    return kind(x) in "fic"


def is_real_number(x):
    return kind(x) in "fi"


def fits(x):
    return x.ndim <= 3 and x.size <= 64


class Values:
    """The values of a running program."""

    def __init__(self, values):
        self.values = list(values)

    def pick(self, n, ok=lambda x: True):
        """The n-th value that is ok, from the latest back; None without any."""
        found = [v for v in reversed(self.values) if ok(v)]
        return found[n % len(found)] if found else None

    def pair(self, a, b, ok):
        """Two values that broadcast together, in one dtype."""
        x = self.pick(a, ok)
        if x is None:
            return None
        y = self.pick(b, lambda y: ok(y) and broadcasts(x, y))
        return promoted(x, y)


def broadcasts(x, y):
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        return False
    return len(shape) <= 3 and np.prod(shape) <= 64


OPERATIONS = {}


def operation(ok=None):
    """Registers a function of one value that is ``ok`` (or of all values) and two numbers."""

    def register(function):
        def run(values, a, b, c):
            if ok is None:
                return function(values, a, b, c)
            x = values.pick(a, ok)
            return None if x is None else function(x, b, c)

        OPERATIONS[function.__name__] = run
        return function

    return register


UNARY = [jnp.sin, jnp.tanh, jnp.exp, jnp.log, jnp.sqrt, lax.rsqrt, jax.nn.sigmoid, jnp.floor]
UNARY += [jnp.square, lambda x: x**3, lambda x: x**-1, lax.erf, jnp.log1p, jnp.expm1, jnp.cbrt]
UNARY += [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softplus, lambda x: 1 / x, lax.round]
UNARY += [jnp.sign, jnp.isfinite, jnp.cosh, jnp.arctan, lax.stop_gradient, jnp.isnan, jnp.rint]
UNARY += [lambda x: checkpoint_name(x, "named"), lax.optimization_barrier, lax.neg, lax.abs]
BINARY = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum]
FLOAT_BINARY = [jnp.divide, jnp.power, jnp.arctan2, jnp.remainder, jnp.hypot, jnp.logaddexp]
COMPARE = [jnp.less, jnp.equal, jnp.greater_equal, jnp.not_equal]
SUMS = [jnp.sum, jnp.mean, jnp.prod, jnp.cumsum, jnp.var]
EXTREMA = [jnp.max, jnp.min, jnp.argmax, jnp.argmin]
SOFT = [jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp, jax.nn.standardize]
MOVES = [jnp.ravel, jnp.transpose, jnp.squeeze, lambda x: x[None], lambda x: x[..., None]]
MOVES += [lambda x: jnp.stack([x, x]), lambda x: jnp.tile(x, 2), lambda x: jnp.flip(x)]
MOVES += [lambda x: x[:2] if x.ndim else x, lambda x: jnp.pad(x, 1), lambda x: jnp.roll(x, 1)]
MOVES += [lambda x: jnp.broadcast_to(x, (2, *x.shape)), jnp.copy, lambda x: x.reshape(x.size, 1)]


@operation(is_float)
def unary(x, b, c):
    return UNARY[b % len(UNARY)](x)


@operation(is_float)
def with_literal(x, b, c):
    number = NUMBERS[c % len(NUMBERS)]
    return [
        lambda: x + number,
        lambda: number * x,
        lambda: jnp.maximum(x, number),
        lambda: jnp.where(x > number, x, number),
        lambda: x / number if number else x,
        lambda: jnp.clip(x, -1.0, number),
        lambda: jnp.full_like(x, number) + x,
    ][b % 7]()


@operation()
def binary(values, a, b, c):
    pair = values.pair(a, b, is_number)
    if not pair:
        return None
    # JAX 0.12 cannot differentiate the maximum of complex numbers.
    functions = BINARY if is_real_number(pair[0]) else BINARY[:3]
    return functions[c % len(functions)](*pair)


@operation()
def float_binary(values, a, b, c):
    pair = values.pair(a, b, is_float)
    return FLOAT_BINARY[c % len(FLOAT_BINARY)](*pair) if pair else None


@operation()
def compare(values, a, b, c):
    pair = values.pair(a, b, is_real_number)
    return COMPARE[c % len(COMPARE)](*pair) if pair else None


@operation(is_float)
def sums(x, b, c):
    function = SUMS[b % len(SUMS)]
    axis = c % x.ndim if x.ndim else None
    return function(x, axis=axis if c % 3 or function is jnp.cumsum else None)


@operation(lambda x: is_real_number(x) and x.size)
def extrema(x, b, c):
    return EXTREMA[b % 4](x, axis=c % x.ndim if x.ndim and c % 3 else None, keepdims=bool(c % 2))


@operation(lambda x: is_float(x) and x.ndim and x.size)
def soft(x, b, c):
    return SOFT[b % len(SOFT)](x, axis=c % x.ndim)


@operation()
def matmul(values, a, b, c):
    x = values.pick(a, lambda x: kind(x) in "fc" and x.ndim)
    if x is None:
        return None
    inner = lambda y: kind(y) in "fc" and y.ndim and y.shape[-2:][0] == x.shape[-1]
    y = values.pick(b, lambda y: inner(y) and y.ndim <= 2)
    y = jnp.swapaxes(x, -1, -2) if y is None and x.ndim > 1 else x if y is None else y
    precision = lax.Precision.HIGHEST if c % 5 == 0 else None
    return jnp.matmul(*promoted(x, y), precision=precision)


@operation(lambda x: is_float(x) and x.ndim == 2 and x.size)
def convolution(x, b, c):
    return lax.conv_general_dilated(x[None, None], x[None, None], (1, 1), "SAME")[0, 0]


@operation(fits)
def move(x, b, c):
    return MOVES[b % len(MOVES)](x)


@operation()
def concatenate(values, a, b, c):
    x = values.pick(a, lambda x: is_number(x) and x.ndim and fits(x))
    if x is None:
        return None
    y = values.pick(b, lambda y: is_number(y) and y.shape[1:] == x.shape[1:] and y.ndim == x.ndim)
    return jnp.concatenate(promoted(x, y))


@operation()
def where(values, a, b, c):
    pair = values.pair(a, b, is_number)
    if pair is None:
        return None
    x, y = jnp.broadcast_arrays(*pair)
    mask = values.pick(c, lambda m: kind(m) == "b" and m.shape in ((), x.shape))
    return jnp.where(jnp.sum(x.real) > 0 if mask is None else mask, x, y)


@operation(lambda x: x.ndim and x.shape[0] and is_number(x))
def index(x, b, c):
    n = x.shape[0]
    rows = jnp.array([c % n, 0, b % n])
    return [
        lambda: x[rows],
        lambda: x[c % n],
        lambda: x.at[c % n].set(x[0]),
        lambda: x.at[rows].add(x[rows]),
        lambda: x.at[0].multiply(2),
        lambda: lax.dynamic_slice_in_dim(x, jnp.int32(c % n), 1),
        lambda: lax.dynamic_update_slice_in_dim(x, x[:1], jnp.int32(c % n), 0),
        lambda: jnp.take_along_axis(x, jnp.zeros_like(x, jnp.int32), 0),
    ][b % 8]()


@operation(lambda x: is_real_number(x) and x.ndim and x.shape[-1])
def order(x, b, c):
    return [
        lambda: jnp.sort(x),
        lambda: jnp.argsort(x),
        lambda: lax.top_k(x, 1)[0],
        lambda: lax.cummax(x, axis=c % x.ndim),
    ][b % 4]()


@operation()
def cast(values, a, b, c):
    x, dtype = values.pick(a), DTYPES[b % len(DTYPES)]
    real = x.real if kind(x) == "c" and dtype != "complex64" else x
    return real.astype(dtype)


@operation(is_float)
def to_complex(x, b, c):
    x = x.astype(jnp.float32)
    return [lambda: lax.complex(x, 2 * x), lambda: jnp.abs(lax.complex(x, x))][b % 2]()


@operation()
def constant(values, a, b, c):
    number = NUMBERS[a % len(NUMBERS)]
    return [
        lambda: jnp.asarray(number),  # weakly typed
        lambda: jnp.full((2, 3), number, jnp.float32),
        lambda: jnp.asarray(np.linspace(-2, 70000, 3, dtype=np.float32)),
        lambda: jnp.arange(3) * 1000,
        lambda: jnp.arange(3, dtype=jnp.float32),
        lambda: jnp.asarray(a % 300),
        lambda: jnp.eye(3, dtype=jnp.float16),
    ][b % 7]()


STRUCTURES = {}


def structure(function):
    """Registers a way to apply a function of a value that returns a value of the same type."""
    STRUCTURES[function.__name__.rstrip("_")] = function
    return function


@structure
def jit(f, x, c):
    return jax.jit(f)(x)


@structure
def checkpoint(f, x, c):
    policies = [None, jax.checkpoint_policies.dots_saveable]
    return jax.checkpoint(f, policy=policies[c % 2])(x)


@structure
def cond(f, x, c):
    pred = jnp.sum(x.real).astype(jnp.float32) > c
    return lax.cond(pred, f, lambda x: x, x)


@structure
def scan(f, x, c):
    carry, ys = lax.scan(lambda h, _: ((y := f(h)), jnp.sum(y)), x, None, length=2, reverse=c % 2)
    return carry if c % 3 else jnp.broadcast_to(jnp.sum(ys, dtype=x.dtype), x.shape)


@structure
def scan_over_rows(f, x, c):
    return lax.scan(lambda h, row: (f(h), row), x, jnp.stack([x, x]))[1][0]


@structure
def fori(f, x, c):
    return lax.fori_loop(0, 2, lambda i, h: f(h), x)


@structure
def while_(f, x, c):
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))[1]


@structure
def vmap(f, x, c):
    return jax.vmap(f)(jnp.stack([x, x]))[c % 2]


@structure
def custom_jvp(f, x, c):
    # A custom function that returns a constant returns JAX's literal as it is: no array.
    g = jax.custom_jvp(lambda x: f(x) + 0 * x)
    g.defjvp(lambda primals, tangents: jax.jvp(g.fun, primals, tangents))
    return g(x)


@structure
def custom_vjp(f, x, c):
    g = jax.custom_vjp(lambda x: f(x) + 0 * x)
    g.defvjp(lambda x: jax.vjp(g.fun, x), lambda pull, cotangent: pull(cotangent))
    return g(x)


@structure
def jvp(f, x, c):
    return jax.jvp(f, (x,), (x,))[1] if is_float(x) else f(x)


@structure
def vjp(f, x, c):
    return jax.vjp(f, x)[1](x)[0] if is_float(x) else f(x)


@structure
def scope(f, x, c):
    scopes = [full_precision, lambda: jax.named_scope("part")]
    scopes += [lambda d=d: compute_precision(d) for d in (jnp.float16, jnp.bfloat16)]
    with scopes[c % 4]():
        return f(x)


@structure
def inner_autocast(f, x, c):
    dtypes = [jnp.float16, jnp.bfloat16]
    return autocast(f, compute_dtype=dtypes[c % 2], enabled=c % 3 != 0)(x)


# Their functions may not close over tracers of an enclosing transformation.
CLOSED = {"custom_jvp", "custom_vjp", "inner_autocast", "jvp", "vjp"}
REVERSE = {"vjp", "custom_vjp"}


def as_float32(x):
    return lax.convert_element_type(jnp.real(x), jnp.float32)


def like(x, y):
    """A value of x's type that depends on y."""
    if y.shape == x.shape and y.dtype == x.dtype:
        return y
    if kind(x) == "b":
        return x
    total = jnp.sum(as_float32(y))
    return x + total.astype(x.dtype)


def run(program, inputs):
    """Runs a program; returns all its values."""
    values = Values(inputs)
    for name, a, b, c, body in program:
        if name in STRUCTURES:
            x = values.pick(a, lambda x: fits(x) and is_number(x))
            if x is None:
                continue
            outer = () if name in CLOSED else tuple(values.values)
            f = functools.partial(run_body, body, outer)
            result = STRUCTURES[name](f, x, c)
        else:
            result = OPERATIONS[name](values, a, b, c)
        if isinstance(result, float | int):  # JAX 0.12 returns a constant of a body so
            result = jnp.asarray(result)
        if result is not None and fits(result):
            values.values.append(result)
    return values.values


def run_body(body, outer, x):
    return like(x, run(body, (*outer, x))[-1])


def has_reverse_mode(program, inside=True):
    """False if JAX could not differentiate it: reverse mode has no while loop."""
    return not any(
        (name == "while" and inside) or not has_reverse_mode(body, inside or name in REVERSE)
        for name, *_, body in program
    )


def as_function(program):
    """A function of a tree of parameters and more arrays that returns a tree."""

    def fn(params, *data):
        inputs = [jnp.asarray(v) for v in (*jax.tree.leaves(params), *data)]
        with np.errstate(all="ignore"):  # numbers outside a 16-bit array's range
            found = run(program, inputs)
        new = found[len(inputs) :]
        return {"last": found[-1], "others": tuple(new[-4:-1]), "static": (1.5, 2, True, None)}

    return fn


numbers = st.integers(0, 59)


def programs(exclude=(), size=8):
    """Programs of up to ``size`` steps, and bodies in bodies."""
    simple = st.tuples(st.sampled_from(sorted(OPERATIONS)), numbers, numbers, numbers, st.just(()))
    names = sorted(STRUCTURES.keys() - set(exclude))

    def nest(bodies):
        holder = st.tuples(st.sampled_from(names), numbers, numbers, numbers, bodies)
        return st.lists(st.one_of(simple, holder), min_size=1, max_size=4).map(tuple)

    bodies = st.recursive(st.lists(simple, min_size=1, max_size=3).map(tuple), nest, max_leaves=3)
    holder = st.tuples(st.sampled_from(names), numbers, numbers, numbers, bodies)
    found = st.lists(st.one_of(simple, simple, holder), min_size=1, max_size=size).map(tuple)
    return found.filter(lambda program: has_reverse_mode(program, inside=False))


def arguments(dtypes=tuple(DTYPES), weak=True):
    """A tree of parameters and up to three more arrays, as types or as Python scalars."""
    arrays = st.builds(
        lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
        st.sampled_from(SHAPES),
        st.sampled_from(dtypes),
    )
    scalars = st.sampled_from([0.5, 2])
    leaves = st.one_of(arrays, arrays, arrays, scalars) if weak else arrays
    params = st.dictionaries(st.sampled_from("ab"), leaves, max_size=2)
    return st.tuples(params, leaves, arrays)
