"""What jaxprs hold in numbers: bytes, floating point operations, casts.

`jax.export` may make a length symbolic. It counts as 128 then, so that a report has numbers to add
up and to sort by, and says so.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...call.arguments import check_function
from ...interpreters.compat import AnyJaxpr, Atom, JaxprEqn, assumed_size
from ...interpreters.plan.symbolic_sizes import element_count
from ...interpreters.primitives.called_back import bodies_that_run
from ...interpreters.primitives.held_contraction import contraction_in
from ...interpreters.primitives.reading import flops
from ...interpreters.primitives.structure import bodies, equations_in
from ...policies import DATA_MOVEMENT, FLOAT32, STRUCTURAL, narrow_dtypes
from ...policies.errors import with_usage
from ..calls import traced
from ..export import scaled, table


def is_arithmetic(eqn: JaxprEqn) -> bool:
    """False for data movement, casts, and what has a jaxpr inside, whose own equations count."""
    name = (contraction_in(eqn) or eqn).primitive.name
    return name not in DATA_MOVEMENT and name not in STRUCTURAL and not bodies(eqn)


def flops_of(eqn: JaxprEqn) -> int:
    """Returns the estimated floating point operations of one run of an equation."""
    return assumed_size(flops(eqn)) if is_arithmetic(eqn) else 0


def nbytes_of(atom: Atom, dtype: str | None = None) -> int:
    """Returns the bytes of a variable or literal, 0 for what is no array.

    Args:
        atom: The variable or literal.
        dtype: The name of the dtype that it has, None for the one it declares.
    """
    declared = getattr(atom.aval, "dtype", None)
    if declared is None:
        return 0
    # A random key has a dtype that NumPy does not know. It is never cast.
    item = declared if dtype in (None, str(declared)) else jnp.dtype(dtype)
    # Other dtypes of JAX, such as the pair of an int8 and its tangent, say nothing of their bytes.
    return assumed_size(element_count(atom)) * getattr(item, "itemsize", 0)


@dataclasses.dataclass(frozen=True)
class Casts:
    """Casts between float32 and the 16-bit dtypes, with loops multiplied by their length.

    Where float32 is the compute dtype: between float64 and float32.

    Args:
        down: The number of casts to 16 bits.
        down_nbytes: The bytes that they read and write.
        up: The number of casts to float32.
        up_nbytes: The bytes that they read and write.
    """

    down: int = 0
    down_nbytes: int = 0
    up: int = 0
    up_nbytes: int = 0


def count_casts(jaxpr: AnyJaxpr, wide: np.dtype = FLOAT32) -> Casts:
    """Counts the casts of a jaxpr and of those inside it.

    Args:
        jaxpr: An open or closed jaxpr.
        wide: The wide dtype of the policy.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> count_casts(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16))(jnp.ones(3)))
        Casts(down=1, down_nbytes=18, up=0, up_nbytes=0)
    """
    found: Counter[str] = Counter()
    for eqn, times in equations_in(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        (operand,), (result,) = eqn.invars, eqn.outvars
        # Casts of other dtypes are the program's own: `autocast` makes none of them.
        for way, full, low in (("down", operand, result), ("up", result, operand)):
            if full.aval.dtype == wide and low.aval.dtype in narrow_dtypes(wide):
                found[way] += times
                found[f"{way}_nbytes"] += times * (nbytes_of(full) + nbytes_of(low))
    return Casts(**found)


# A screen: a program has some fifty primitives in some dtypes each.
_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class OpCount:
    """The equations of one primitive with the same dtypes.

    Args:
        primitive: The primitive's name.
        operands: The dtypes of its operands, each once.
        results: The dtypes of its results, each once.
        times: How often it runs, with loops multiplied by their length.
        flops: Estimated floating point operations; 0 for data movement, casts, and what has an
            inside.
        nbytes: Bytes of operands and results; 0 for what has an inside.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import op_stats
        >>> (count,) = op_stats(jnp.exp, jnp.ones(4))
        >>> count.primitive, count.operands, count.times, count.nbytes
        ('exp', ('float32',), 1, 32)
    """

    primitive: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    times: int
    flops: int
    nbytes: int


class OpCounts(list[OpCount]):
    """The counts of a program: a list that prints as a table.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import op_stats
        >>> print(op_stats(jnp.exp, jnp.ones(4)))
            times   FLOPs   bytes  primitive              operands -> results
                1      4      32   exp                    float32 -> float32
    """

    def __str__(self) -> str:
        """Returns a line per primitive and dtypes, those with the most FLOPs first."""
        columns = {"times": ">9", "FLOPs": ">7", "bytes": ">7", "primitive": "22"}
        columns["operands -> results"] = ""

        def cells(count: OpCount) -> list[Any]:
            dtypes = f"{', '.join(count.operands)} -> {', '.join(count.results)}"
            numbers = [count.times, scaled(count.flops), scaled(count.nbytes)]
            return [*numbers, count.primitive, dtypes]

        return "\n".join(table(columns, self, cells, _SHOWN, "more in the list"))


@with_usage("op_stats(fn, *args)")
def op_stats(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> OpCounts:
    """Counts the primitives of a function by dtype, as it is: with or without `autocast`.

    It computes nothing and accepts ``jax.ShapeDtypeStruct`` in place of any array. A symbolic
    length of `jax.export` counts as 128.

    Args:
        fn: The function, such as ``jax.grad(autocast(loss))``.
        *args: Its positional arguments, as arrays or ``jax.ShapeDtypeStruct``.
        **kwargs: Its keyword arguments.

    Returns:
        A list of counts per primitive and dtypes, the most FLOPs first, then the most bytes, which
        prints as a table. How often a ``while`` runs is unknown: its inside counts once, also that
        of an iterative solver, such as ``jax.scipy.sparse.linalg.cg``.

    Raises:
        TypeError: ``fn`` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import autocast, op_stats
        >>> f = autocast(lambda x: jnp.sum(x @ x), jnp.bfloat16)
        >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> for count in op_stats(f, x)[:2]:
        ...     print(count.primitive, count.operands, count.times, count.flops)
        dot_general ('bfloat16',) 1 1024
        reduce_sum ('float32',) 1 64
    """
    check_function(fn, "op_stats", "Pass the function itself, then its arguments.")
    _, closed = traced(fn, args, kwargs, abstract=True)
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0])
    for eqn, times in equations_in(closed, inside=bodies_that_run):
        # A contraction that hands out its accumulator has the sources of its operands behind them,
        # for their gradients. It counts as the contraction that runs.
        ran = contraction_in(eqn) or eqn
        ends = eqn.invars[: len(ran.invars)], eqn.outvars
        names = [tuple(dict.fromkeys(str(getattr(v.aval, "dtype", None)) for v in e)) for e in ends]
        counted = sums[ran.primitive.name, *names]
        counted[0] += times
        # What has an inside counts there.
        if not bodies_that_run(eqn):
            counted[1] += times * flops_of(eqn)
            counted[2] += times * sum(map(nbytes_of, [*ends[0], *ends[1]]))
    counts = [OpCount(*key, *counted) for key, counted in sums.items()]
    order = lambda c: (-c.flops, -c.nbytes, c.primitive, c.operands)  # noqa: E731
    return OpCounts(sorted(counts, key=order))
