"""The primitives that JAX's public functions and their derivatives make, by tracing alone.

Each function is called with a few generic arguments. Of each kind of equation that it makes, the
jvp and the vjp are traced, and of each new kind in those again: the second derivatives.
"""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import jax.scipy.cluster.vq
import jax.scipy.fft
import jax.scipy.integrate
import jax.scipy.interpolate
import jax.scipy.ndimage
import jax.scipy.signal
import jax.scipy.stats
import numpy as np
import optax
from jax import lax

from jmp_autocast.interpreters.compat import bind
from jmp_autocast.policies.tables import CALLS
from tests.support.jaxprs import equations, inner_jaxprs

_STATS = [m for _, m in inspect.getmembers(jax.scipy.stats, inspect.ismodule)]
MODULES = (
    *(jnp, jnp.linalg, jnp.fft, jax.nn, lax, lax.linalg, jax.random, jax.image, jax.ops),
    *(jax.scipy.special, jax.scipy.linalg, jax.scipy.signal, jax.scipy.integrate, jax.scipy.fft),
    *(jax.scipy.ndimage, jax.scipy.cluster.vq, jax.scipy.stats, *_STATS, optax.losses),
)
# Their derivatives hold the derivatives of their bodies.
_LOOPS = frozenset(("scan", "while", "cond"))
# They read or write files, or change how NumPy prints.
_SIDE_EFFECTS = frozenset("save savez load fromfile set_printoptions printoptions".split())


def _array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


_X, _V, _S = _array(4, 4), _array(4), _array()
_I, _IV, _I0 = (_array(*shape, dtype=jnp.int32) for shape in ((4, 4), (4,), ()))
_C, _B = _array(4, 4, dtype=jnp.complex64), _array(4, 4, dtype=bool)
_KEY = jax.eval_shape(lambda: jax.random.key(0))

# Arguments of floats, of other dtypes, and complex ones, by their number.
_ARGUMENTS = (
    {
        1: [(_X,), (_V,), (_S,), ([_X, _X],)],
        2: [(_X, _X), (_V, _V), (_X, _V), (_X, 0), (_X, 2), (_X, _IV), (_X, (4, 4)), (_B, _X)],
        3: [(_X, _X, _X), (_S, _V, _S), (_B, _X, _X), (_X, 0, 1), (_X, _X, 0), (_X, _I, 0)],
        4: [(_X,) * 4, (_V,) * 4, (_X, _S, lax.add, (0, 1)), (_X, _I, _X, 0)],
    },
    {
        1: [(_I,), (_B,), (4,), ((4, 4),), (_KEY,)],
        2: [(_I, _I), (_B, _B), (4, 4), (_KEY, (4, 4)), (_KEY, _X), (_KEY, 4), (jnp.add, _X)],
        3: [(_I, _I, _I), (_KEY, _X, _X), (_X, (0, 0), (2, 2)), (_X, _X, (_I0, _I0))],
        4: [(_KEY, _X, _X, _X), (_KEY, (4, 4), 0, 9)],
    },
    {1: [(_C,)], 2: [(_C, _C)]},
)


def _mapped(fn):
    """``fn`` on the shards of one device."""
    mesh = jax.make_mesh((1,), ("i",))
    return lambda *args: jax.shard_map(
        fn, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )(*args)


def _of_refs(x):
    ref = jax.new_ref(x)
    ref[0] = ref[1] * 2.0
    jax.ref.addupdate(ref, 0, x[2])
    y = jax.ref.swap(ref, 0, x[3]) + jax.ref.freeze(ref)
    other = jax.new_ref(y)
    y = y + other[...]
    jax.ref.free_ref(other)
    return y


# Groups of rows that a product sums over, as in the gradient of a mixture of experts.
_RAGGED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
_PAIR, _N1 = np.array([0, 2]), _array(1, dtype=jnp.int32)
_IMAGE, _ROW = _array(1, 1, 4, 4), _array(1, 4)
# Functions that need arguments of their own, a mesh or a ref.
_SPECIAL = (
    (lambda x: jnp.einsum("ij,kj->ik", x, x), _X),
    (lambda x: x.at[_PAIR].set(x[1]) + x.at[_PAIR].add(1.0) - x.at[_PAIR].subtract(x[1]), _X),
    (lambda x: x.at[_PAIR].multiply(x[1]) + x.at[_PAIR].min(x[0]) + x.at[_PAIR].max(x[1]), _X),
    (lambda x: x.at[_PAIR].apply(jnp.sin) + lax.reduce_precision(x, 8, 7), _X),
    (lambda x: lax.conv(x, x, (1, 1), "SAME"), _IMAGE),
    (lambda x: jax.nn.dot_product_attention(x, x, x), _array(1, 4, 2, 8)),
    (lambda x, n: lax.ragged_dot(x, x[None], n), _X, _N1),
    (lambda x, n: lax.ragged_dot_general(x, x, n, _RAGGED), _X, _N1),
    (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"), _X),
    (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), _X),
    (lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 2), (2, 2), "VALID"), _X),
    (lambda x: lax.reduce_window(x, 1.0, lax.mul, (2, 2), (2, 2), "VALID"), _X),
    (lambda x: lax.reduce_xor(x, (0,)), _I),
    (lambda x: (lax.split(x, (2, 2)), lax.pad(x, 0.0, [(1, 1, 1)] * 2)), _X),
    (lambda x: lax.bitcast_convert_type(x, jnp.int32), _X),
    (lambda x: lax.linalg.tridiagonal_solve(x, x, x, x[:, None]), _V),
    (lambda x: lax.linalg.lu_pivots_to_permutation(x, 4), _IV),
    (lambda x: lax.scan(lambda h, v: (jnp.sin(h) * v, h), x[0], x), _X),
    (lambda x: lax.fori_loop(0, 3, lambda i, h: jnp.sin(h), x), _X),
    (lambda x: lax.while_loop(lambda h: h.sum() < 1, jnp.sin, x), _X),
    (lambda x: lax.map(jnp.sin, x) + jax.checkpoint(jnp.cos)(x), _X),
    (lambda x, n: lax.switch(n, (jnp.sin, jnp.cos), x), _X, _I0),
    (lambda x: lax.custom_root(lambda y: y - x, x, lambda f, y: y, lambda f, y: y / f(1.0)), _S),
    (lambda x: jax.ad_checkpoint.checkpoint_name(x, "x") + lax.optimization_barrier(x), _X),
    (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), _X),
    (lambda x: lax.composite(jnp.sin, "mine")(x), _X),
    (lambda x: jax.device_put(x, jax.devices()[0]) + lax.rng_uniform(0.0, 1.0, (4, 4)), _X),
    (lambda x: jax.pure_callback(np.sin, x, x), _X),
    (_of_refs, _X),
    (jnp.unpackbits, _array(4, dtype=jnp.uint8)),
    (lambda x: jax.random.key_data(jax.random.fold_in(jax.random.key(x), x)), _I0),
    (lambda x: jax.scipy.ndimage.map_coordinates(x, [x, x], 1), _X),
    (lambda x: jax.scipy.linalg.eigh_tridiagonal(x, x[1:], eigvals_only=True), _V),
    (lambda x: optax.losses.ctc_loss(x[None], x[:1], _PAIR[None], x[:1, :2]), _X),
    (_mapped(lambda x: lax.psum(x, "i") + lax.pmean(x, "i") + lax.all_gather(x, "i")[0]), _X),
    (_mapped(lambda x: lax.ppermute(x, "i", [(0, 0)]) * lax.axis_index("i")), _X),
    (_mapped(lambda x: lax.psum_scatter(x, "i") + lax.all_to_all(x, "i", 0, 0)[0]), _ROW),
)


def _functions():
    for module in MODULES:
        for name, fn in vars(module).items():
            is_public = not name.startswith("_") and name not in _SIDE_EFFECTS
            if is_public and callable(fn) and not inspect.isclass(fn):
                yield f"{module.__name__}.{name}", fn


def _counts(fn):
    """How many arguments a function may take: what it requires and up to two more."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return range(1, 4)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = max(sum(p.default is p.empty for p in positional), 1)
    more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return range(required, 4 if more else min(len(positional), required + 2) + 1)


def _traced(fn, *args):
    """The jaxpr of a call; arguments without a dtype are static."""
    leaves, tree = jax.tree.flatten(args)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}

    def call(*values):
        given = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
        return jax.tree.leaves(fn(*tree.unflatten(given.values())))

    return jax.make_jaxpr(call)(*arrays.values())


def _first(fn, rows):
    """The jaxpr of the first call that JAX traces, None if it refuses all of them."""
    for args in rows:
        with contextlib.suppress(Exception):  # wrong arguments are refused in any way
            return _traced(fn, *args)
    return None


def _kind(eqn):
    """Equations of one kind have derivatives of the same primitives."""
    name, params = eqn.primitive.name, eqn.params
    inner = [tuple(e.primitive.name for e in equations(j)) for j in inner_jaxprs(eqn)]
    if name in _LOOPS:
        return name  # the equations in it are differentiated by themselves
    dtypes = [str(getattr(v.aval, "dtype", "")) for v in eqn.invars]
    return name, *dtypes, *inner, str(params.get("mode")), str(params.get("exponent"))


def _is_float(x):
    return jnp.issubdtype(getattr(x, "dtype", int), jnp.inexact)


def _derivatives(eqn):
    """The jvp and the vjp of an equation as functions of its operands, and the operands."""
    avals = [v.aval for v in eqn.invars]
    floats = [i for i, a in enumerate(avals) if _is_float(a)]

    def split(operands):
        def of_floats(*values):
            given = dict(enumerate(operands)) | dict(zip(floats, values, strict=True))
            results = jax.tree.leaves(bind(eqn.primitive, list(given.values()), eqn.params))
            return [y for y in results if _is_float(y)]

        return of_floats, [operands[i] for i in floats]

    def jvp(*operands):
        fn, values = split(operands)
        return jax.jvp(fn, values, values)

    def vjp(*operands):
        fn, values = split(operands)
        results, transposed = jax.vjp(fn, *values)
        return transposed(results)

    return ((jvp, vjp) if floats else ()), [_array(*a.shape, dtype=a.dtype) for a in avals]


class Made:
    """Primitives and the first call or derivative that makes each; which functions were called.

    Args:
        orders: How many times each equation is differentiated.
    """

    def __init__(self, orders=2):
        self.origins, self.called = {}, []
        self._kinds, self._new = set(), []
        for name, fn in _functions():
            found = [_first(fn, [a for n in _counts(fn) for a in t.get(n, ())]) for t in _ARGUMENTS]
            self._add(name, found)
            self.called += [name] if any(found) else []
        self._add("a special call", [_traced(fn, *args) for fn, *args in _SPECIAL])
        for _ in range(orders):
            self._differentiate()

    def _add(self, origin, jaxprs):
        for eqn in (eqn for jaxpr in jaxprs if jaxpr for eqn in equations(jaxpr)):
            self.origins.setdefault(eqn.primitive.name, origin)
            if eqn.primitive.name not in CALLS and (kind := _kind(eqn)) not in self._kinds:
                self._kinds.add(kind)
                self._new.append(eqn)

    def _differentiate(self):
        new, self._new = self._new, []
        for eqn in new:
            derivatives, operands = _derivatives(eqn)
            for fn in derivatives:
                origin = f"the {fn.__name__} of {eqn.primitive.name}"
                self._add(origin, [_first(fn, [operands])])
