"""Values of the running program, each of which is cast once per dtype.

A *source* is a value such as a parameter. Each copy of a value has a key: a dtype, or an encoding
such as float8. Consumers read the 16-bit copy of a source through a `source_view`, so that the
gradient is added up in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...policies import FLOAT32
from ..compat import JaxprEqn, Tracer, aval_of, without_nan_checks
from ..plan.constant_range import ConstantRange
from ..plan.copies import CopyKey, Tag
from ..plan.data import EquationPlan, ValueState
from ..primitives.cached_bind import bind_cached, cast, with_cached_derivative
from ..primitives.clamped_cast import clamped, clamped_array, is_clamped
from ..primitives.source_view import source_view
from ..primitives.traits import having

REPEATS = having("repeats")


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value of the running program, with its copies in other dtypes so far.

    Args:
        array: The value in the dtype in which it was computed.
        source: Whether each 16-bit read is a `source_view`, so that the gradient is float32. A
            source that is not a tracer has no gradient, and is cast at trace time.
        move: If the value is the result of a move, such as a transpose: makes a copy of the value
            from a copy of the operand. Otherwise None; then the array itself is cast or encoded.
        known: The value of all elements, if it is known at trace time.
        const_range: The range of a constant's elements; None if the value is not a constant.
        tag: The data that an extension such as float8 has about a source; see `plan.copies.Tag`.
        meets_in_float32: Whether the cotangents of its uses are added up in float32, although it
            was computed in a narrower dtype.
    """

    array: Any
    source: bool = False
    move: Callable[[CopyKey], Any] | None = None
    known: float | None = None
    const_range: ConstantRange | None = None
    tag: Tag | None = None
    meets_in_float32: bool = False
    copies: dict[CopyKey, Any] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def of(cls, array: Any, state: ValueState) -> Value:
        """Returns the value of an array, with the facts that the plan has about it.

        Args:
            array: The value in the dtype in which it was computed.
            state: The facts.
        """
        known, const_range = state.known_value, state.const_range
        source = state.keeps_gradient
        return cls(array, source, known=known, const_range=const_range, tag=state.tag)

    def is_read_often(self) -> None:
        """Marks a computed value as a source, so that each 16-bit read of it is a `source_view`."""
        self.source = True
        self.meets_in_float32 = self.array.dtype.itemsize < FLOAT32.itemsize

    def read(self, dtype: np.dtype | None) -> Any:
        """Returns the value in a dtype, or in its own dtype if ``dtype`` is None."""
        if dtype is None or self.array.dtype == dtype:
            if not self.meets_in_float32:
                return self.array
            return source_view(self.copy(FLOAT32), self.array)
        # Neither a computed value, whose cotangents are added in its own dtype, nor a copy that is
        # wider than the value needs a `source_view`.
        low, is_rounded = self.copy(dtype), dtype.itemsize <= self.array.dtype.itemsize
        return source_view(self.array, low) if self.source and is_rounded else low

    def replicated(self, copy: Any, broadcast: Callable[[Any], Any], is_bias: bool) -> Any:
        """Broadcasts the value's copy in a compute dtype, with a derivative in float32.

        The transpose of a broadcast is a sum. Over 4,096 pixels, a sum of 16-bit cotangents stops
        growing at 256.
        """
        # The float32 broadcast exists for its transpose only: XLA removes it from the forward pass.
        low = broadcast(copy)
        # The float32 broadcast of a bias starts from its 16-bit copy. So the gradient of the bias,
        # summed in float32, is rounded to 16 bits at the end.
        full = cast(copy, FLOAT32) if is_bias else self.copy(FLOAT32)
        return source_view(broadcast(full), low) if isinstance(full, Tracer) else low

    def factor(self, dtype: np.dtype | None) -> tuple[Any, Any]:
        """Returns the value in a dtype, and the source if the result is a copy of one, else None.

        Unlike the result of `read`, the copy has no gradient. The caller must give the gradient to
        the source, as `accumulating_contraction` does; otherwise the source's gradient is zero.
        """
        if not self.source or dtype is None or self.array.dtype == dtype:
            return self.read(dtype), None
        return self.copy(dtype), self.array

    def copy(self, key: CopyKey) -> Any:
        """Returns the copy of the value for a key, made once; a source's copy has no gradient."""
        if self.array.dtype == key:
            return self.array
        if key not in self.copies:
            # Since JAX 0.12, JAX casts concrete arrays with NumPy, whose warning about an overflow
            # to infinity is turned off.
            is_traced = isinstance(self.array, Tracer)
            quiet = contextlib.nullcontext() if is_traced else np.errstate(over="ignore")
            with quiet, without_nan_checks():
                if self.move:
                    self.copies[key] = self.move(key)
                elif isinstance(key, np.dtype):
                    self.copies[key] = self._cast(key)
                else:
                    with self._where_made():
                        self.copies |= key.copies(self.array, self.copies, self.tag)
        return self.copies[key]

    @contextlib.contextmanager
    def _where_made(self) -> Iterator[None]:
        """Returns the context in which copies are made: at trace time, if the source is concrete.

        The mesh of the context is that of the value, which is empty for an array from outside of
        meshes. The first consumer may be under another mesh: `x.at[i].get(out_sharding=...)` of an
        explicitly sharded array runs under automatic axes.
        """
        mesh = jax.typeof(self.array).sharding.mesh
        with contextlib.ExitStack() as contexts:
            if mesh != jax.sharding.get_abstract_mesh():
                contexts.enter_context(jax.sharding.use_abstract_mesh(mesh))
            if self.source and not isinstance(self.array, Tracer):
                contexts.enter_context(jax.ensure_compile_time_eval())
            yield

    def _cast(self, dtype: np.dtype) -> Any:
        # The array may be a tracer although its value is known, such as the fill value of a
        # `jnp.where`, which is jitted.
        if is_clamped(self.known, dtype):
            return lax.full_like(self.array, clamped(self.known, dtype)[()], dtype)
        is_beyond = self.const_range is not None and self.const_range.is_clamped()
        if is_beyond and dtype == np.dtype(jnp.bfloat16):
            with jax.ensure_compile_time_eval():
                return clamped_array(self.array)
        with self._where_made():
            return cast(self.array, dtype)


@dataclasses.dataclass(eq=False, slots=True)
class Scalar:
    """A literal of the program, which is cast at trace time and never differentiated."""

    array: Any

    def read(self, dtype: np.dtype | None) -> Any:
        """Returns the literal in a dtype."""
        return self.array if dtype is None else self.copy(dtype)

    def factor(self, dtype: np.dtype | None) -> tuple[Any, Any]:
        """Returns the literal in a dtype, and None, because a literal has no source."""
        return self.read(dtype), None

    def copy(self, dtype: np.dtype) -> Any:
        """Returns the literal in a dtype."""
        return clamped(self.array, dtype)[()]


def read(plan: EquationPlan, operands: list[Any]) -> list[Any]:
    """Returns the operands of an equation in the dtypes of its plan."""
    return [value.read(dtype) for value, dtype in zip(operands, plan.operands, strict=True)]


def as_array(x: Any, aval: Any) -> Any:
    """Returns a primal, tangent or cotangent of a derivative rule as an array of a type.

    JAX accepts Python numbers in place of such arrays and passes them on, as in ``vjp(1.0)``.
    """
    return np.asarray(x, aval.dtype) if isinstance(x, bool | int | float | complex) else x


def replication(eqn: JaxprEqn, arrays: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns a function that broadcasts an operand of an equation to the shape of its result.

    Args:
        eqn: The equation.
        arrays: Its operands.
    """
    if eqn.primitive.name in REPEATS:
        return lambda x: bind_cached(eqn.primitive, [x, *arrays[1:]], eqn.params)
    aval = aval_of(eqn.outvars[0])
    # The spec of an aval names only explicit mesh axes. If there are none, JAX decides the
    # sharding.
    return _broadcast_to(aval.shape, aval.sharding if any(aval.sharding.spec) else None)


@functools.lru_cache(maxsize=4096)
def _broadcast_to(shape: tuple[int, ...], sharding: Any) -> Callable[[Any], Any]:
    """Returns the one function that broadcasts to a shape, so that JAX caches its derivative."""

    def broadcast(x: Any) -> Any:
        dims = tuple(range(x.ndim)) if x.ndim == len(shape) else ()
        return lax.broadcast_in_dim(x, shape, dims, out_sharding=sharding)

    return with_cached_derivative(broadcast)
