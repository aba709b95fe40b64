"""The values of a program against arrays that another framework stored, matched by name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...call.arguments import check_function, name_of
from ...policies.errors import did_you_mean, shown, wrong_type
from ..calls import traced
from ..export import cut
from .error_probe import distance, largest_difference
from .named_values import ProgramComparison, named_errors, values_of

TOLERANCE = 1e-3
"""An error that rounding in float32 does not make, in any order of sums."""

_NAMED = 12  # names in a message


@dataclasses.dataclass(frozen=True)
class StoredComparison(ProgramComparison):
    """What ``compare(fn, ..., against={name: array})`` returns.

    Args:
        name: The function's name.
        against: How many arrays it was compared with.
        values: The named values, in the order in which the program makes them. Errors are relative
            to the stored arrays.
        outputs: The outputs that were stored, by their position.
        unmatched: Nothing: every array has its value.
        transposed: How the axes of stored arrays were permuted, by name.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jmp_autocast import compare
        >>> def model(x):
        ...     with jax.named_scope("double"):
        ...         x = 2 * x
        ...     with jax.named_scope("square"):
        ...         return x * x
        >>> x = jnp.arange(4.0)
        >>> stored = {"double": np.float32([0, 2, 4, 6]), "square": np.float32([0, 4, 16, 37])}
        >>> compare(model, x, against=stored).first_beyond().name
        'square'
    """

    transposed: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The comparison in one line.

        Example:
            >>> import jax.numpy as jnp, numpy as np
            >>> from jmp_autocast import compare
            >>> compare(jnp.sin, jnp.zeros(4), against={"output 0": np.zeros(4)}).summary
            'sin against 1 stored array: values err by 0 at most'
        """
        worst = max(each.error for each in (*self.values, *self.outputs.values()))
        return cut(f"{self.name} against {self.against}: values err by {worst:.2g} at most")

    def __str__(self) -> str:
        """Returns the first value that is off, then what a `ProgramComparison` returns."""
        first = self.first_beyond()
        line = f"no value errs by more than {TOLERANCE:g}"
        if first is not None:
            line = f"first beyond {TOLERANCE:g}: {first.name}, which errs by {first.error:.2g}"
        moved = [f"{name} by {axes}" for name, axes in self.transposed.items()]
        lines = [cut(line)] + ([cut(f"transposed: {', '.join(moved)}")] if moved else [])
        return "\n".join([*lines, super().__str__()])


def compare_stored(
    fn: Callable[..., Any],
    stored: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StoredComparison:
    """Runs a program, and compares its values with stored arrays of the same name.

    Args:
        fn: The function.
        stored: Arrays by the names of scopes, by those that `checkpoint_name` gives, or by
            ``"output 0"``. The last part of a name will do if no other name ends so, and points
            stand for slashes, as in the names of PyTorch's modules.
        args: The function's positional arguments.
        kwargs: Its keyword arguments.
    """
    check_function(fn, "compare", "Pass the arrays as against=.")
    arrays = _arrays(stored)
    call, closed = traced(fn, args, kwargs)
    # Shapes alone: what does not belong together is told before anything is compiled.
    ended: dict[str, int] = {}
    known = jax.eval_shape(lambda *xs: values_of(closed, xs, ended), *call.arrays)
    names = {key: _match(key, known, name_of(fn)) for key in arrays}
    axes = {key: _axes(key, arrays[key].shape, known[names[key]].shape) for key in arrays}
    # In the order in which the program makes them: the first that is off is where to look. A scope
    # ends after those inside it.
    ordered = sorted(arrays, key=lambda key: (ended[names[key]], -names[key].count("/")))
    references = [np.transpose(arrays[key], axes[key]) for key in ordered]

    @jax.jit
    def run(xs: Sequence[Any], references: Sequence[Any]) -> Any:
        found = values_of(closed, xs)
        results = [found[names[key]] for key in ordered]
        pairs = zip(references, results, strict=True)
        return [(distance(a, b), largest_difference(a, b)) for a, b in pairs]

    dtypes = [(known[names[key]].dtype.name, arrays[key].dtype.name) for key in ordered]
    named = list(zip(map(names.__getitem__, ordered), dtypes, strict=True))
    moved = {names[key]: axes[key] for key in ordered if axes[key] != _same(arrays[key].ndim)}
    against = f"{len(arrays)} stored array{'s' * (len(arrays) != 1)}"
    errors = named_errors(run(call.arrays, references), named)
    return StoredComparison(name_of(fn), against, *errors, unmatched=(), transposed=moved)


def _arrays(stored: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    if not stored:
        raise ValueError(
            "against= is empty, and has to hold what to compare with. Write "
            "against={'layer_0': array}."
        )
    found = {}
    for key, value in stored.items():
        if not isinstance(key, str):
            fix = "Write the name of a scope, such as 'layer_0', or 'output 0'."
            raise wrong_type("Each key of against= must be a name", key, fix)
        array = value if callable(getattr(value, "__array__", None)) else np.asarray(value)
        try:
            array = np.asarray(array)
        except (RuntimeError, TypeError):  # a tensor of PyTorch with a gradient, or of a GPU
            array = np.asarray(None)
        if not jnp.issubdtype(array.dtype, jnp.inexact) or not array.size:
            raise TypeError(
                f"against[{key!r}] must be an array of floats, got {shown(value)} of type "
                f"{type(value).__name__}. Pass a NumPy array: tensor.detach().cpu().numpy()."
            )
        found[key] = array
    return found


def _match(key: str, known: Mapping[str, Any], fn: str) -> str:
    """Returns the name of the value that a key means."""
    path = key.replace(".", "/")
    for name in (key, path):
        if name in known:
            return name
    found = [name for name in known if name.endswith(f"/{path}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"against={{{key!r}: ...}} may mean {' or '.join(map(repr, found[:_NAMED]))} of {fn}. "
            "Write one of these."
        )
    last = {name.rsplit("/", 1)[-1]: name for name in known}
    hint = did_you_mean(path, known) or did_you_mean(path.rsplit("/", 1)[-1], last)
    some = ", ".join(map(repr, [*known][:_NAMED])) + ", ..." * (len(known) > _NAMED)
    raise ValueError(
        f"against= names {key!r}, and no value of {fn} has that name.{hint} It has {some}. Name "
        "others by jax.named_scope, or jax.ad_checkpoint.checkpoint_name."
    )


def _same(ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim))


def _axes(key: str, stored: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
    """Returns how to permute the axes of a stored array: not at all, or one of them is elsewhere.

    Channels stand behind the batch in PyTorch, and last here; the others keep their order. So an
    array of squares has one such permutation, and not two.
    """
    stored, own = tuple(stored), tuple(own)
    if stored == own:
        return _same(len(own))
    orders = set()
    for source, target in itertools.product(_same(len(stored)), repeat=2):
        order = [axis for axis in _same(len(stored)) if axis != source]
        orders.add((*order[:target], source, *order[target:]))
    moves = {order for order in orders if tuple(stored[axis] for axis in order) == own}
    if len(moves) == 1:
        return moves.pop()
    several = f", and {len(moves)} ways lead from one to the other" if moves else ""
    raise ValueError(
        f"against[{key!r}] has the shape {stored}, and the value has {own}{several}. Pass it in "
        "the value's shape, or with one axis elsewhere, as channels are in NCHW and NHWC."
    )
