"""Autocast in 150 lines: this package without loops, derivative rules and its exceptions.

Products (matmuls, convolutions) compute in 16 bits, functions that need digits or range in float32.
All else computes in 16 bits only on a path from a product to a product. Three passes over a flat
list of equations: `mark_paths` backward, `choose_dtypes` forward, and `run`, which casts.

    python docs/design/autocast_in_150_lines.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

# PyTorch's lists, by the names of JAX's primitives.
PRODUCTS = "dot_general conv_general_dilated ragged_dot_general".split()
FLOAT32 = """exp exp2 expm1 log log1p log2 pow rsqrt acos acosh asin asinh atan atanh cosh sinh tan
    erf_inv lgamma digamma one_minus_square cholesky eigh lu qr svd triangular_solve fft reduce_sum
    reduce_prod reduce_window_sum cumsum cumprod cumlogsumexp scatter-add""".split()
COMPUTES = """add add_any sub mul div rem atan2 square integer_pow sqrt cbrt sin cos tanh logistic
    erf erfc floor ceil round""".split()
# Moves and choices return elements of their operands: they round nothing.
CHOOSES = """reshape transpose broadcast_in_dim squeeze rev slice dynamic_slice gather split unstack
    tile copy copy_p stop_gradient name concatenate stack pad dynamic_update_slice scatter
    scatter-max scatter-min select_n max min clamp neg abs sign reduce_max reduce_min cummax cummin
    reduce_window_max sort top_k argmax argmin eq ne lt le gt ge is_finite convert_element_type
    """.split()
CALLS = "jit closed_call remat2 checkpoint custom_jvp_call custom_vjp_call".split()


@dataclasses.dataclass(eq=False)
class Value:
    """An input, a constant or the result of an equation.

    Args:
        dtype: The declared dtype; once planned, the dtype that it has when the program runs.
        number: The value of a literal or a constant.
        is_computed: It depends on a product or on a float32 function. Inputs and what depends on
            inputs alone wait in float32, and do not vote.
        leads: It is on a path to a product.
    """

    dtype: object
    number: object = None
    is_computed: bool = False
    leads: bool = False

    @property
    def is_float(self):
        """Whether autocast may cast it."""
        return self.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass
class Equation:
    """A primitive with its parameters, operands and results; planned, the dtype it computes in."""

    primitive: object
    params: dict
    operands: list
    results: list
    dtype: object = None


def flatten(closed, inputs, program):
    """Appends the equations of a jaxpr, and of calls in it, to ``program``; returns its outputs."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for v, number in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
        known[v] = Value(v.aval.dtype, number)

    def values(atoms):
        return [Value(v.aval.dtype, v.val) if isinstance(v, Literal) else known[v] for v in atoms]

    for eqn in jaxpr.eqns:
        operands = values(eqn.invars)
        if eqn.primitive.name in CALLS:
            body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            results = flatten(body, operands, program)
        else:
            results = [Value(v.aval.dtype) for v in eqn.outvars]
            program.append(Equation(eqn.primitive, eqn.params, operands, results))
        known |= zip(eqn.outvars, results, strict=True)
    return values(jaxpr.outvars)


def mark_paths(program):
    """Marks, backward, the values that lead to a product."""
    for eqn in reversed(program):
        leads = any(v.leads and v.is_float for v in eqn.results)
        if eqn.primitive.name in PRODUCTS or (leads and eqn.primitive.name in COMPUTES + CHOOSES):
            for v in eqn.operands:
                v.leads = True


def choose_dtypes(program, low):
    """Chooses, forward, the dtype of each equation: by the lists, the operands and the paths."""
    for eqn in program:
        name, leads = eqn.primitive.name, any(v.leads for v in eqn.results)
        votes = [v.dtype for v in eqn.operands if v.is_float and v.is_computed]
        follows_products = votes and all(dtype == low for dtype in votes)
        is_between = follows_products and (name in CHOOSES or (name in COMPUTES and leads))
        eqn.dtype = low if name in PRODUCTS or is_between else jnp.float32
        for v in eqn.results:
            if v.is_float:
                v.dtype, v.is_computed = eqn.dtype, bool(votes) or name in PRODUCTS + FLOAT32


def run(program, values):
    """Binds each equation on operands in its dtype, and adds the results to ``values``."""
    for eqn in program:
        pairs = [(v.is_float, values.get(v, v.number)) for v in eqn.operands]
        operands = [jnp.asarray(x, eqn.dtype) if is_float else x for is_float, x in pairs]
        asked = {"preferred_element_type": eqn.dtype} if eqn.primitive.name in PRODUCTS else {}
        results = eqn.primitive.bind(*operands, **{**eqn.params, **asked})
        results = results if eqn.primitive.multiple_results else [results]
        values |= zip(eqn.results, results, strict=True)


def plan(fn, *args, low=jnp.bfloat16):
    """Returns the program of a call with its dtypes, the inputs, the outputs and their shapes."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    inputs, program = [Value(v.aval.dtype) for v in closed.jaxpr.invars], []
    outputs = flatten(closed, inputs, program)
    mark_paths(program)
    choose_dtypes(program, low)
    return program, inputs, outputs, shapes


def autocast(fn, low=jnp.bfloat16):
    """Returns ``fn`` in mixed precision; its results keep their declared dtypes."""

    @functools.wraps(fn)
    def wrapped(*args):
        program, inputs, outputs, shapes = plan(fn, *args, low=low)
        values = dict(zip(inputs, jax.tree.leaves(args), strict=True))
        run(program, values)
        leaves, tree = jax.tree.flatten(shapes)
        results = zip((values.get(v, v.number) for v in outputs), leaves, strict=True)
        return tree.unflatten([jnp.asarray(x, leaf.dtype) for x, leaf in results])

    return wrapped


if __name__ == "__main__":
    x = jnp.ones((8, 8))
    for equation in plan(lambda w, x: jax.nn.gelu(jax.nn.softmax(x @ w) @ w) @ w, x, x)[0]:
        print(f"{equation.primitive.name:20}", jnp.dtype(equation.dtype).name)
