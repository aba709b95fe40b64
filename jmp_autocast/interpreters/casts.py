"""Casts: one per value and dtype, and leaf views that keep gradients in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from ..policies import FLOAT32
from .compat import Tracer, define_linear_view, inlined
from .emit import cast

leaf_view_p: Any = define_linear_view("leaf_view")
_inlined_view = inlined(leaf_view_p.bind)


def leaf_view(full: Any, low: Any) -> Any:
    """Reads a leaf in 16 bits while its gradient accumulates in float32.

    The value is ``low``; the derivative is that of casting ``full``. Each use of a leaf reads a
    view of its own, so that each use's cotangent is widened to float32 before they are added. A
    shared cast adds them in 16 bits: a weight used 513 times with gradient 2.0 gets 1.5.

    Args:
        full: The leaf, float32.
        low: Its 16-bit copy, of the same shape.

    Returns:
        ``low``, as a function of ``full``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jnp.ones(())
        >>> low = w.astype(jnp.bfloat16)
        >>> uses = lambda w: sum(
        ...     leaf_view(w, low).astype(jnp.float32) * 2 / 513 for _ in range(513)
        ... )
        >>> bool(abs(jax.grad(uses)(w) - 2.0) < 1e-2)
        True
    """
    return _inlined_view(full, low) if isinstance(full, Tracer) else low


class Value:
    """A value of the running program, and the casts of it that were asked for.

    Args:
        array: The value in the dtype that it was computed in.
        leaf: It is a leaf: 16-bit reads are views. A leaf without a tracer has no gradient, and
            its casts are done at trace time.
        move: Makes a 16-bit copy by moving the operand's; None to cast the value itself.
    """

    __slots__ = ("array", "copies", "leaf", "move")

    def __init__(
        self, array: Any, leaf: bool = False, move: Callable[[np.dtype], Any] | None = None
    ) -> None:
        self.array: Any = array
        self.leaf: bool = leaf
        self.move: Callable[[np.dtype], Any] | None = move
        self.copies: dict[np.dtype, Any] = {}

    def read(self, dtype: np.dtype | None) -> Any:
        """Returns the value in a dtype, None for the value as it is."""
        if dtype is None or self.array.dtype == dtype:
            return self.array
        low = self.copy(dtype)
        return leaf_view(self.array, low) if self.leaf and dtype != FLOAT32 else low

    def replicated(self, dtype: np.dtype | None, broadcast: Callable[[Any], Any]) -> Any:
        """Returns the value in a 16-bit dtype and broadcast, with the derivative of float32.

        The transpose of a broadcast is a sum. Over 4,096 pixels, one of 16-bit cotangents stops
        growing at 256.
        """
        low = broadcast(self.copy(dtype or self.array.dtype))
        full = self.copy(FLOAT32)
        return leaf_view(broadcast(full), low) if isinstance(full, Tracer) else low

    def factor(self, dtype: np.dtype | None) -> tuple[Any, Any]:
        """Returns the value in a dtype, and the leaf that it is a copy of, None for no leaf.

        Unlike what `read` returns, the copy has no gradient: who takes the pair sees to that.
        """
        if not self.leaf or dtype is None or self.array.dtype == dtype:
            return self.read(dtype), None
        return self.copy(dtype), self.array

    def copy(self, dtype: np.dtype) -> Any:
        """Returns the one cast of the value to ``dtype``; for a leaf, without its gradient."""
        if self.array.dtype == dtype:
            return self.array
        if dtype not in self.copies:
            # From 0.12 JAX casts what is not traced with NumPy, which warns of an infinity.
            with np.errstate(over="ignore"):
                self.copies[dtype] = self.move(dtype) if self.move else self._cast(dtype)
        return self.copies[dtype]

    def _cast(self, dtype: np.dtype) -> Any:
        if self.leaf and not isinstance(self.array, Tracer):
            with jax.ensure_compile_time_eval():
                return lax.convert_element_type(self.array, dtype)
        # A user of the value may stand under another mesh: `x.at[i].set` of an explicitly sharded
        # array runs under automatic axes.
        mesh = jax.typeof(self.array).sharding.mesh
        if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
            return cast(self.array, dtype)
        with jax.sharding.use_abstract_mesh(mesh):
            return cast(self.array, dtype)


class Scalar:
    """A literal of the program: cast at trace time, and never differentiated."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array: Any = array

    def read(self, dtype: np.dtype | None) -> Any:
        """Returns the literal in a dtype."""
        return self.array if dtype is None else self.copy(dtype)

    def factor(self, dtype: np.dtype | None) -> tuple[Any, Any]:
        """Returns the literal in a dtype, and no leaf."""
        return self.read(dtype), None

    def copy(self, dtype: np.dtype) -> Any:
        """Returns the literal in a dtype."""
        with np.errstate(over="ignore"):
            return np.asarray(self.array).astype(dtype)[()]
