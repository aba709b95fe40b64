"""Which arguments of a call hold parameters, where the user did not say.

Parameters have no vote in the choice of dtypes. Data taken for parameters would be rounded to 16
bits where it meets them, so a guess needs evidence: what products read as weights, what the
argument is, the names inside it, its own name. A name alone, such as a key "input" in a tree of
weights, decides nothing against what products read. Only without any evidence the position
decides, as it does for `jax.grad`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..policies.callables import name_of, positional_names
from .read_as_weights import SURE

# The last word of a name says what it is: `model_inputs` are inputs, `target_params` parameters.
_PARAM_WORDS = frozenset(
    "param params parameters weights theta model models module net network variables vars "
    "trainable generator discriminator critic actor teacher student".split()
)
_DATA_WORDS = frozenset(
    "batch batches minibatch data x xs y ys input inputs image images pixels tokens ids token "
    "label labels target targets example examples sample samples feature features obs "
    "observation observations mask masks carry cache stats key keys rng rngs".split()
)
# The names of leaves in Flax, Haiku, Equinox, Keras and PyTorch, and of those written by hand.
_PARAM_LEAF = re.compile(r"(kernel|bias|scale|embedding|weight|gamma|beta|param)(s|es)?([_\d].*)?")
_LETTER = re.compile(r"[wWbB]\d*|[wW]_.*")
_DATA, _DATA_INSIDE, _NOTHING, _LETTERS, _PARAMS = range(5)
Reads: TypeAlias = Callable[[], Mapping[int | str, int]]
"""How much the products of a program say for each argument, as `read_as_weights`."""


def guessed_params(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reads: Reads = dict,
) -> set[int | str]:
    """Returns the positions and keywords of the arguments that hold parameters.

    Args:
        fn: The function; its signature names the positional arguments.
        args: The positional arguments.
        kwargs: The keyword arguments.
        reads: Is called where names leave a doubt.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(batch, params): ...
        >>> guessed_params(loss, ({"image": jnp.ones(2)}, {"kernel": jnp.ones(2)}), {})
        {1}
    """
    # A lone array is more often data than a parameter; a tree of arrays may be a model.
    trees = {i: x for i, x in enumerate(args) if _is_tree_of_floats(x)}
    trees |= {name: x for name, x in kwargs.items() if _is_tree_of_floats(x)}
    if not trees:
        return set()
    names = dict[Any, str](enumerate(positional_names(fn)))
    found = {key: _evidence(names.get(key, str(key)), x) for key, x in trees.items()}
    # Names that say of one what it is, and of all others that they are data, need no second look.
    named = {key for key, it in found.items() if it == _PARAMS}
    if named and all(it in (_PARAMS, _DATA) for it in found.values()):
        return named
    known = reads()
    if sure := {key for key in found if known.get(key) == SURE}:
        # A product reads the matrix of a graph as well, which a name tells from weights.
        weights = {key for key in sure if found[key] > _DATA}
        return weights | named or sure
    found |= {key: _LETTERS for key, it in found.items() if known.get(key) and it < _LETTERS}
    best = max(found.values())
    if best >= _LETTERS:
        return {key for key, it in found.items() if it == best}
    if found.get(0, _DATA) in (_DATA, _DATA_INSIDE):
        return set()
    # Nothing speaks for or against the first. Alone it is the model, as it is for `jax.grad`.
    if list(found.values()).count(_NOTHING) > 1:
        warnings.warn(
            f"{name_of(fn)} takes several containers of arrays, and nothing says which of them "
            "holds the parameters; the first one is taken. Parameters have no vote in the choice "
            "of dtypes, so that data taken for parameters may be rounded. Say which: "
            "autocast(fn, params=0), or params=None for none.",
            stacklevel=2,
        )
    return {0}


def _is_tree_of_floats(x: Any) -> bool:
    if jax.tree_util.all_leaves([x]):
        return False
    leaves = (getattr(leaf, "dtype", None) for leaf in jax.tree_util.tree_leaves(x))
    return any(dtype is not None and jnp.issubdtype(dtype, jnp.floating) for dtype in leaves)


def _evidence(name: str, tree: Any) -> int:
    """Returns how much speaks for an argument's being parameters, from `_DATA` to `_PARAMS`."""
    words = name.lower().replace("state_dict", "params").split("_")
    if "non" in words:  # Keras's `non_trainable_variables`: statistics
        return _DATA
    for word in reversed(words):
        if word in _PARAM_WORDS or word in _DATA_WORDS:
            return _PARAMS if word in _PARAM_WORDS else _DATA
    # A model that is a pytree, such as Equinox's, is called.
    if callable(tree):
        return _PARAMS
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = {_text(key) for path, _ in paths for key in path}
    if any(_PARAM_LEAF.fullmatch(key) for key in keys):
        return _PARAMS
    if keys & _DATA_WORDS:
        return _DATA_INSIDE
    # A letter alone may be anything: it counts where no argument has more to show.
    return _LETTERS if any(_LETTER.fullmatch(key) for key in keys) else _NOTHING


def _text(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", key)))
