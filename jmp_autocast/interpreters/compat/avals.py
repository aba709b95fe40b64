"""Facts about abstract values for which JAX has no public attribute, and symbolic zeros."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jax.interpreters import ad
from jax.ref import AbstractRef
from jax.sharding import NamedSharding, PartitionSpec


def aval_of(atom: Any) -> Any:
    """Returns the aval of a variable or literal, typed as Any: JAX's stubs give it no dtype."""
    return atom.aval


def is_array_aval(aval: Any) -> bool:
    """Returns whether an abstract value is a plain array, and not a ref or a token."""
    return type(aval) is jax.core.ShapedArray


def is_ref(aval: Any) -> bool:
    """Returns whether an abstract value is a mutable reference (``jax.new_ref``)."""
    return isinstance(aval, AbstractRef)


def may_change(aval: Any) -> bool:
    """Returns whether a trace may change a value of this type. Refs do not count.

    No jaxpr can be traced from such a type alone, because the type does not describe the contents.
    Flax's hijax variables have such types.
    """
    return bool(getattr(aval, "has_qdd", False))


def is_on_host(aval: Any) -> bool:
    """Returns whether arrays of a type are in host memory, as offloaded arrays are."""
    return aval.memory_space == jax.memory.Space.Host


def is_unreduced(aval: Any) -> bool:
    """Returns whether arrays of a type hold partial sums on each device, not yet added up."""
    return bool(aval.sharding.spec.unreduced)


def summed_sharding(aval: Any) -> Any:
    """Returns the sharding of an array after its sum over devices; None if the array needs no sum.

    A `reduced` array is whole on each device, but its cotangent is `unreduced`.
    """
    spec = aval.sharding.spec
    if not (spec.unreduced or spec.reduced):
        return None
    # JAX 0.10.0 has no `partitions`, so the spec is iterated over. Later releases refuse to iterate
    # over an unreduced spec.
    partitions = getattr(spec, "partitions", None)
    sizes = tuple(spec) if partitions is None else partitions
    return NamedSharding(aval.sharding.mesh, PartitionSpec(*sizes))


ASSUMED_LENGTH = 128
"""The length that each variable of a symbolic dimension is assumed to have."""


def assumed_size(length: Any) -> int:
    """Returns a size; for a symbolic size, its value with each variable at 128.

    `jax.export` traces with symbolic dimensions. Comparisons of sizes need only the order of
    magnitude: ``2*b`` is larger than ``b``, and ``b*s`` is larger than either.
    """
    if not is_symbolic_dim(length):
        return length
    # The lengths are int64, because their product could overflow JAX's int32.
    lengths: Any = dict.fromkeys(length._get_vars(), np.int64(ASSUMED_LENGTH))
    return int(length._evaluate(lengths))


def with_dtype(aval: Any, dtype: Any) -> Any:
    """Returns an abstract value with another dtype and the same sharding and mesh axes."""
    return aval.update(dtype=dtype, weak_type=False)


def set_weak_type(x: Any, aval: Any) -> Any:
    """Casts ``x`` to the dtype and weak type of ``aval``; the public cast drops weak types."""
    return lax.convert_element_type_p.bind(
        x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None
    )


def device_varying(tree: Any, axes: Any = None) -> Any:
    """Marks arrays as varying over the devices of the surrounding ``shard_map``, if there is one.

    The carry of a loop must keep its type. A counter starts as the same zero on all devices, but
    its later values may differ between them.

    Args:
        tree: The arrays.
        axes: The mesh axes along which they vary; None for all manual axes.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes if axes is None else axes

    def vary(x: Any) -> Any:
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array in a ``shard_map`` varies."""
    return jax.typeof(x).mat.varying


def has_other_cotangent(aval: Any) -> bool:
    """Returns whether a value and its cotangent differ in type, as for an unreduced array."""
    return aval.to_ct_aval() != aval


def zero_cotangent(aval: Any) -> Any:
    """Returns a zero cotangent for a function from `jax.vjp`, symbolic where JAX accepts it.

    A user's rule with symbolic zeros must get a symbolic zero, and not an array. Since JAX 0.12, an
    array of zeros that all elements of a batch share is an error. JAX 0.10.0 accepts arrays only.
    """
    if jax.__version_info__ >= (0, 10, 2):
        return ad.Zero(aval.to_ct_aval())
    inexact = jax.numpy.issubdtype(aval.dtype, np.inexact)
    return np.zeros(aval.shape, aval.dtype if inexact else jax.dtypes.float0)
