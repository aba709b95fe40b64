"""Random products and convolutions in mixed precision, against float64 of the rounded operands.

    python -m tests.fuzz.products --programs 2000 --seed 1

Each is one program under ``jit(grad(autocast(...)))``: any ranks, layouts, strides, groups and
sizes of 1, the operands transposed before and the result after it, mapped, or checkpointed. A form
that XLA has no kernel for ends the process, or adds up in 16 bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_autocast import Policy, autocast
from tests.support.exact_products import Exact, error, exact_convolution, exact_einsum

from .command import run_many

# What float32 accumulation of rounded operands is off by, rounded once or twice.
BOUND = 0.005


class Program(NamedTuple):
    """A function of two arrays that is linear in each.

    Args:
        name: What it is.
        fn: The function.
        operands: Two arrays of bfloat16 numbers.
        exact: Its value and pullback in float64.
    """

    name: str
    fn: Callable[[Any, Any], Any]
    operands: list[jax.Array]
    exact: Exact


def _array(rng: Any, shape: Any) -> jax.Array:
    # Not by `jnp.asarray`, which compiles a program for each shape.
    numbers = rng.standard_normal([int(n) for n in shape]).astype(np.float32)
    return jax.device_put(numbers.astype(jnp.bfloat16))


def random_product(rng: Any) -> Program:
    """A sum of products over at least one dimension."""
    counts = rng.integers([0, 1, 0, 0], [3, 3, 3, 3])
    letters = iter("abcdefghij")
    batch, summed, rows, columns = ([next(letters) for _ in range(n)] for n in counts)
    sizes = {i: int(rng.choice([1, 2, 5, 9, 17, 40])) for i in "abcdefghij"}
    sizes |= {i: int(rng.choice([1, 2, 3])) for i in batch}
    terms = ["".join(rng.permutation(batch + summed + free)) for free in (rows, columns)]
    form = f"{terms[0]},{terms[1]}->{''.join(rng.permutation(batch + rows + columns))}"
    operands = [_array(rng, [sizes[i] for i in t]) for t in terms]
    fn = lambda a, b: jnp.einsum(form, a, b)
    return Program(f"{form} {sizes}", fn, operands, exact_einsum(form, *operands))


def random_convolution(rng: Any) -> Program:
    """A convolution of one to three dimensions."""
    rank = int(rng.integers(1, 4))
    axes = "012"[:rank]
    specs = ["".join(rng.permutation([*f, *axes])) for f in ("NC", "IO", "NC")]
    groups = int(rng.choice([1, 1, 2, 4]))
    features, out = (int(n) * groups for n in rng.choice([1, 3, 8], 2))
    spatial, window = rng.choice([4, 7, 9], rank), rng.choice([1, 1, 2, 3], rank)
    images = {"N": rng.choice([1, 2, 5]), "C": features} | dict(zip(axes, spatial, strict=True))
    kernel = {"I": features // groups, "O": out} | dict(zip(axes, window, strict=True))
    operands = [
        _array(rng, [sizes[c] for c in spec])
        for spec, sizes in zip(specs, (images, kernel), strict=False)
    ]
    options = dict(
        window_strides=rng.integers(1, 4, rank).tolist(),
        padding=[(int(rng.integers(-1, 3)), int(rng.integers(0, 2))) for _ in range(rank)],
        lhs_dilation=rng.choice([1, 1, 2], rank).tolist(),
        rhs_dilation=rng.choice([1, 1, 2], rank).tolist(),
        feature_group_count=groups,
    )

    def fn(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, dimension_numbers=tuple(specs), **options)

    (eqn,) = jax.make_jaxpr(fn)(*operands).jaxpr.eqns
    exact = exact_convolution(*operands, eqn.params)
    name = f"{specs} {[x.shape for x in operands]} {options}"
    return Program(name, fn, operands, exact)


def _transposed(rng: Any, program: Program) -> Program:
    """The result's dimensions in another order, as `(a @ b).T`."""
    value, pullback = program.exact
    order = rng.permutation(value.ndim).tolist()
    exact = np.transpose(value, order), lambda g: pullback(np.transpose(g, np.argsort(order)))
    fn = lambda a, b: jnp.transpose(program.fn(a, b), order)
    return Program(f"{program.name}, then {order}", fn, program.operands, exact)


def _fed(rng: Any, program: Program) -> Program:
    """The operands arrive with their dimensions in another order."""
    value, pullback = program.exact
    orders = [rng.permutation(x.ndim).tolist() for x in program.operands]
    moved = [jnp.transpose(x, order) for x, order in zip(program.operands, orders, strict=True)]

    def fn(*arrays: Any) -> Any:
        pairs = zip(arrays, orders, strict=True)
        return program.fn(*(jnp.transpose(x, np.argsort(order)) for x, order in pairs))

    def moved_back(g: np.ndarray) -> list[np.ndarray]:
        return [np.transpose(d, o) for d, o in zip(pullback(g), orders, strict=True)]

    return Program(f"{program.name}, from {orders}", fn, moved, (value, moved_back))


def _mapped(rng: Any, program: Program) -> Program:
    """Twice the left operand, mapped over; the right one is shared."""
    (value, pullback), (a, b) = program.exact, program.operands
    fn = jax.vmap(program.fn, in_axes=(0, None))

    def of_both(g: np.ndarray) -> list[np.ndarray]:
        (left, right), (second, also) = pullback(g[0]), pullback(g[1])
        return [np.stack([left, second]), right - also]

    exact = np.stack([value, -value]), of_both
    return Program(f"{program.name}, mapped", fn, [jnp.stack([a, -a]), b], exact)


def random_program(rng: Any) -> Program:
    """A product or a convolution, and what is around it."""
    program = (random_product, random_convolution)[rng.integers(2)](rng)
    for around in (_transposed, _fed, _mapped):
        if rng.random() < 0.25:
            program = around(rng, program)
    if rng.random() < 0.2:
        program = program._replace(fn=jax.checkpoint(program.fn))
    return program


def failures(seed: int) -> list[str]:
    """Runs one random program; returns what is wrong with its value and gradients.

    Not where XLA's float32 is wrong, too.
    """
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    policy = Policy("bfloat16", level=str(rng.choice(["o1", "compute", "by_hand"])))
    value, pullback = program.exact
    cotangent = _array(rng, value.shape)

    def loss(a: Any, b: Any) -> Any:
        y = program.fn(a, b)
        return jnp.sum(y * cotangent.astype(y.dtype)), y

    wide = [x.astype(jnp.float32) for x in program.operands]
    # The product itself is returned by a function of its own: beside the loss it has two readers.
    product = autocast(program.fn, policy=policy, output_dtype="computed")
    gradients = jax.grad(autocast(loss, policy=policy), (0, 1), True)
    found = jax.jit(lambda a, b: [product(a, b), *gradients(a, b)[0]])(*wide)
    exact = [value, *pullback(np.asarray(cotangent, np.float64))]
    offs = [error(got, right) for got, right in zip(found, exact, strict=True)]
    if all(off <= BOUND for off in offs):
        return []
    plain = jax.jit(lambda a, b: [program.fn(a, b), *jax.grad(loss, (0, 1), True)(a, b)[0]])(*wide)
    own = [error(got, right) for got, right in zip(plain, exact, strict=True)]
    return [
        f"seed {seed}, {what} off by {off:.4f}: {program.name}"
        for what, off, xla in zip(("value", "left", "right"), offs, own, strict=True)
        if not off <= BOUND and xla <= BOUND
    ]


def main() -> int:
    checked = lambda seed, index, _: ("products", "\n".join(failures(seed + index)))
    return run_many("products", checked, None)


if __name__ == "__main__":
    raise SystemExit(main())
