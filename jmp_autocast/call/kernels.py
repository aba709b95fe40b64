"""The decorator `in_compute_dtype`, for kernels that run with 16-bit operands."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax import lax

from ..interpreters.compat import is_ref
from ..interpreters.compat.kernel_calls import KERNEL_DTYPE, current_scopes, kernels_in
from ..policies import COMPUTE_DTYPES, FLOAT32, Policy
from ..policies.callables import is_function, name_of
from ..policies.dtypes import find_dtype
from ..policies.errors import wrong_type
from ..scopes import CAST, FULL, GOVERNED, mark, read_mark

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_decorated: set[str] = set()  # "yes" once a kernel was decorated in this process


def kernels_of(policy: Policy) -> AbstractContextManager[Any]:
    """Returns a context in which decorated kernels run in the policy's compute dtype."""
    return kernels_in(np.dtype(policy.compute_dtype))


def traced_with_kernels(policy: Policy, trace: Callable[[], T]) -> T:
    """Returns the result of a trace in which decorated kernels run in the compute dtype.

    If no kernel is decorated, the trace shares JAX's caches with traces outside of `autocast`.

    Args:
        policy: The policy.
        trace: A function that traces a program. It is called a second time if the first call
            decorates a kernel.
    """
    if not _decorated:
        traced = trace()
        if not _decorated:
            return traced
    with kernels_of(policy):
        return trace()


def in_compute_dtype(kernel: F) -> F:
    """Decorates a kernel that runs with 16-bit operands under `autocast`.

    A kernel (a ``pallas_call``, an ``ffi_call``, a function with a custom derivative) is written
    for operands of certain dtypes, so `autocast` casts none of its operands. Under `autocast` the
    decorated function calls ``kernel`` with its float32 operands in the compute dtype, also inside
    ``vmap``, ``shard_map``, loops and checkpoints. Its results have the dtypes that ``kernel``
    declares for float32 operands; a result whose consumers read 16 bits stays in 16 bits. Inside
    ``full_precision()``, and without `autocast`, the decorated function calls ``kernel`` with its
    operands unchanged.

    Args:
        kernel: A function of pytrees of arrays; all other leaves are static.

    Returns:
        The decorated function.

    Raises:
        TypeError: ``kernel`` is not a function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, autocast, in_compute_dtype
        >>> @jax.custom_vjp
        ... def attention(q, k):
        ...     return q @ k.T
        >>> attention.defvjp(lambda q, k: (q @ k.T, None), lambda _, g: (g, g))
        >>> fn = autocast(in_compute_dtype(attention), policy=BF16)
        >>> "bf16[2,2] = dot_general" in str(jax.make_jaxpr(fn)(jnp.ones((2, 4)), jnp.ones((2, 4))))
        True
    """
    if not is_function(kernel):
        raise wrong_type(
            "in_compute_dtype takes a function", kernel, "Write in_compute_dtype(my_kernel)."
        )

    _decorated.add("yes")

    @functools.wraps(kernel, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        dtype = _dtype_here()
        return kernel(*args, **kwargs) if dtype is None else _lowered(kernel, dtype, args, kwargs)

    return cast(F, called)


def _dtype_here() -> np.dtype | None:
    """Returns the compute dtype for kernels in the current scopes; None to keep declared dtypes."""
    dtype: np.dtype | None = KERNEL_DTYPE.value
    if dtype is None:
        return None
    for name in filter(None, map(read_mark, current_scopes())):
        found = find_dtype(name)
        if found is not None or name in (FULL, GOVERNED):
            dtype = found if found in COMPUTE_DTYPES else None
    return dtype


def _lowered(kernel: Callable[..., Any], dtype: np.dtype, args: Any, kwargs: Any) -> Any:
    """Calls a kernel with operands in the compute dtype; casts results to their declared dtypes."""
    leaves, tree = jax.tree.flatten((args, kwargs))

    def run(leaves: list[Any]) -> Any:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return kernel(*args, **kwargs)

    def declared(arrays: dict[int, Any]) -> Any:
        return run([arrays.get(i, x) for i, x in enumerate(leaves)])

    # Decorated kernels that this kernel calls get their operands unchanged.
    with kernels_in(None):
        low = [_cast(x, dtype) if _is_array(x) and x.dtype == FLOAT32 else x for x in leaves]
        try:
            results, form = jax.tree.flatten(run(low))
        except Exception as error:
            error.add_note(f"in_compute_dtype called {name_of(kernel)} with {dtype} operands.")
            raise
        # The declared dtypes are those for float32 operands. If the kernel refuses float32
        # operands, its 16-bit results count as float32.
        dtypes = [FLOAT32 if _is_array(x) and x.dtype == dtype else None for x in results]
        with contextlib.suppress(Exception):
            arrays = {i: x for i, x in enumerate(leaves) if _is_array(x)}
            dtypes = [x.dtype for x in jax.tree.leaves(jax.eval_shape(declared, arrays))]
    pairs = zip(results, dtypes, strict=True)
    return jax.tree.unflatten(
        form, [_cast(x, d) if _is_array(x) and d not in (None, x.dtype) else x for x, d in pairs]
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not is_ref(jax.typeof(x))


def _cast(x: Any, dtype: Any) -> Any:
    # The name of the scope distinguishes this cast from a cast of the program.
    with jax.named_scope(mark(CAST)):
        return lax.convert_element_type(x, dtype)
