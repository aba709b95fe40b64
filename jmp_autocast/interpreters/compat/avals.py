"""Abstract values: facts about JAX's types without a public attribute, and its symbolic zeros."""

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
    """Returns the aval of a variable or literal as Any: JAX's stubs give it no shape or dtype."""
    return atom.aval


def is_array_aval(aval: Any) -> bool:
    """True for plain arrays; false for refs, tokens and other abstract values."""
    return type(aval) is jax.core.ShapedArray


def is_ref(aval: Any) -> bool:
    """True for the type of a mutable reference (``jax.new_ref``)."""
    return isinstance(aval, AbstractRef)


def may_change(aval: Any) -> bool:
    """True for the type of a value whose contents a trace may change, other than a ref's.

    Such a type does not describe its contents (a "quasi-dynamic datum" of JAX does), so that no
    jaxpr can be traced for the type alone. Flax's hijax variables are such values.
    """
    return bool(getattr(aval, "has_qdd", False))


def is_on_host(aval: Any) -> bool:
    """True for the type of arrays in the memory of the host, as offloaded ones are."""
    return aval.memory_space == jax.memory.Space.Host


def is_unreduced(aval: Any) -> bool:
    """True for the type of an array whose parts on devices are not yet added up."""
    return bool(aval.sharding.spec.unreduced)


def summed_sharding(aval: Any) -> Any:
    """Returns the sharding of an array once it is added up over devices; None if it is whole.

    A `reduced` array is whole on each device, and its cotangent will be `unreduced`.
    """
    spec = aval.sharding.spec
    if not (spec.unreduced or spec.reduced):
        return None
    # JAX 0.10.0 has no `partitions`, and later releases refuse to iterate over such a spec.
    partitions = getattr(spec, "partitions", None)
    sizes = tuple(spec) if partitions is None else partitions
    return NamedSharding(aval.sharding.mesh, PartitionSpec(*sizes))


ASSUMED_LENGTH = 128
"""What each variable of a symbolic length counts as."""


def assumed_size(length: Any) -> int:
    """Returns a length or a size, and for a symbolic one its value where each variable is 128.

    `jax.export` traces with symbolic lengths. Of sizes that are weighed against each other the
    order of magnitude counts: that ``2*b`` is more than ``b``, and ``b*s`` more than either.
    """
    if not is_symbolic_dim(length):
        return length
    # In int64, in which no product of lengths overflows as it would in JAX's int32.
    lengths: Any = dict.fromkeys(length._get_vars(), np.int64(ASSUMED_LENGTH))
    return int(length._evaluate(lengths))


def with_dtype(aval: Any, dtype: Any) -> Any:
    """Returns the abstract value with another dtype, its sharding and mesh axes kept."""
    return aval.update(dtype=dtype, weak_type=False)


def set_weak_type(x: Any, aval: Any) -> Any:
    """Returns ``x`` in the dtype and weak type of ``aval``; the public cast drops weak types."""
    return lax.convert_element_type_p.bind(
        x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None
    )


def device_varying(tree: Any, axes: Any = None) -> Any:
    """Returns arrays typed as different on each device of the ``shard_map`` around, if any.

    The carry of a loop must keep its type, but a counter that starts as the same zero on all
    devices does not stay the same.

    Args:
        tree: The arrays.
        axes: The mesh axes along which they differ, None for all manual ones.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes if axes is None else axes

    def vary(x: Any) -> Any:
        missing = tuple(a for a in axes if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array in a ``shard_map`` differs."""
    return jax.typeof(x).mat.varying


def has_other_cotangent(aval: Any) -> bool:
    """Returns whether the cotangent of a value has another type, as that of an unreduced one."""
    return aval.to_ct_aval() != aval


def zero_cotangent(aval: Any) -> Any:
    """Returns a symbolically zero cotangent for a function from `jax.vjp`.

    With an array of zeros, a user's rule with symbolic zeros would see an array, and since JAX 0.12
    a cotangent that is shared by a batch is an error. JAX 0.10.0 takes arrays alone.
    """
    if jax.__version_info__ >= (0, 10, 2):
        return ad.Zero(aval.to_ct_aval())
    inexact = jax.numpy.issubdtype(aval.dtype, np.inexact)
    return np.zeros(aval.shape, aval.dtype if inexact else jax.dtypes.float0)
