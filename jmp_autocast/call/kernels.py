"""Kernels that a policy names: called with 16-bit operands, while the program is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax import lax

from ..interpreters.compat import is_ref
from ..interpreters.compat.kernel_calls import INSIDE, calls_through, current_scopes
from ..policies import Policy, narrow_dtypes
from ..policies.dtypes import find_dtype
from ..policies.errors import did_you_mean
from ..policies.kernels import KNOWN, kernel_rules, named_functions
from ..scopes import CAST, FULL, GOVERNED, KERNEL, mark, read_mark


@contextlib.contextmanager
def kernels_of(policy: Policy) -> Iterator[set[str]]:
    """What is traced inside calls kernels as a policy says.

    Args:
        policy: The policy.

    Yields:
        The names of the functions that a rule could name.
    """
    seen: set[str] = set()
    dtype, wide = np.dtype(policy.compute_dtype), policy.wide_dtype
    with calls_through(_Lowers(policy.kernels, dtype, wide, seen) if policy.kernels else None):
        yield seen


def kernels_off() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which kernels are called as they are, also inside another `autocast`."""
    return calls_through(None)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a function, with its arrays apart from the rest."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: Sequence[int]

    def flat(self) -> tuple[list[Any], Any]:
        moving = {i: x for i, x in enumerate(self.args) if i not in self.static}
        return jax.tree.flatten((moving, self.kwargs))

    def run(self, leaves: Sequence[Any], dtypes: tuple[np.dtype, np.dtype] | None) -> Any:
        moving, kwargs = jax.tree.unflatten(self.flat()[1], leaves)
        args = tuple(moving.get(i, x) for i, x in enumerate(self.args))
        return self.function(args, kwargs, dtypes)

    def declared(self) -> list[Any]:
        """Returns the dtypes of the results that the program declares; raises what it raises."""
        leaves = self.flat()[0]
        arrays = {i: x for i, x in enumerate(leaves) if _is_array(x)}

        def whole(arrays: dict[int, Any]) -> Any:
            return self.run([arrays.get(i, x) for i, x in enumerate(leaves)], None)

        return [x.dtype for x in jax.tree.leaves(jax.eval_shape(whole, arrays))]


@dataclasses.dataclass(frozen=True)
class _Lowers:
    """Calls functions that rules name with 16-bit operands, and all others as they are.

    Args:
        rules: Those of a policy.
        dtype: Its compute dtype.
        wide: Its wide dtype.
        seen: Gets the names of the functions.
    """

    rules: tuple[tuple[str, str], ...]
    dtype: np.dtype
    wide: np.dtype
    seen: set[str] = dataclasses.field(compare=False)

    @property
    def functions(self) -> Sequence[str]:
        return named_functions(self.rules)

    def __call__(
        self,
        names: Sequence[str],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        static: Sequence[int],
    ) -> Any:
        """Calls a function; see `Around`."""
        # What stands in for a user's function, with the user's rule inside, is ours.
        if any(name.startswith("jmp_autocast.") for name in names):
            return call(args, kwargs, None)
        self.seen.update(names)
        scope = current_scopes()
        rules = kernel_rules(self.rules, names, [n for n in scope if read_mark(n) is None])
        if not rules:
            return call(args, kwargs, None)
        dtype, (pattern, word) = self._dtype_in(scope), rules[-1]
        with contextlib.ExitStack() as contexts:
            # What the function calls is part of it.
            contexts.enter_context(calls_through(INSIDE))
            for each, _ in rules:
                contexts.enter_context(jax.named_scope(mark(f"{KERNEL}{each}")))
            if word == "declared" or dtype is None:
                return call(args, kwargs, None)
            return self._lowered((pattern, word), names, _Call(call, args, kwargs, static), dtype)

    def _dtype_in(self, scope: Sequence[str]) -> np.dtype | None:
        """Returns the compute dtype in some scopes, None where the code says that none is."""
        dtype: np.dtype | None = self.dtype
        for said in filter(None, map(read_mark, scope)):
            found = find_dtype(said)
            if found is not None or said in (FULL, GOVERNED):
                dtype = found if found in narrow_dtypes(self.wide) else None
        return dtype

    def _lowered(
        self, rule: tuple[str, str], names: Sequence[str], call: _Call, dtype: np.dtype
    ) -> Any:
        leaves = call.flat()[0]
        low = [_cast(x, dtype) if _is_array(x) and x.dtype == self.wide else x for x in leaves]
        try:
            out = call.run(low, (self.wide, dtype))
        except Exception as error:  # a kernel refuses 16 bits in any way: a check, or its compiler
            if rule[1] == "compute_or_declared":
                return call.run(leaves, None)
            raise _explained(error, rule[0], names[0], dtype, self.wide) from error
        results, tree = jax.tree.flatten(out)
        # A kernel for 16 bits alone says nothing of float32: its results are as wide as the rest.
        declared = [self.wide if _is_array(x) and x.dtype == dtype else None for x in results]
        with contextlib.suppress(Exception):  # it may refuse float32 in any way, too
            declared = call.declared()
        pairs = zip(results, declared, strict=True)
        wide = [
            x if d is None or not _is_array(x) or x.dtype == d else _cast(x, d) for x, d in pairs
        ]
        return jax.tree.unflatten(tree, wide)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not is_ref(jax.typeof(x))


def _cast(x: Any, dtype: Any) -> Any:
    with jax.named_scope(mark(CAST)):
        return lax.convert_element_type(x, dtype)


def _explained(
    error: Exception, pattern: str, name: str, dtype: np.dtype, wide: np.dtype
) -> Exception:
    """Returns the error of a function that refuses 16 bits, with a sentence in front."""
    text = (
        f"The policy has {name} run with {dtype} operands, by with_kernels({{{pattern!r}: "
        f"'compute'}}), and it cannot be traced with them. Write 'compute_or_declared' to run it "
        f"in {wide} where that is so, or name the function that calls it. It says: {error}"
    )
    with contextlib.suppress(Exception):
        made = type(error)(text)
        if text in str(made):
            return made
    return ValueError(text)


def unmatched_kernels(policy: Policy, scopes: Sequence[Sequence[str]]) -> list[str]:
    """Returns the patterns of a policy's kernels that match no function: most are misspelled.

    Args:
        policy: The policy; a known kernel that it names need not be there.
        scopes: The scopes of a program, each by its names.
    """
    found = {mark for names in scopes for mark in map(read_mark, names)}
    own = [pattern for pattern, _ in policy.kernels if pattern not in KNOWN]
    return [pattern for pattern in own if f"{KERNEL}{pattern}" not in found]


def report_unmatched_kernels(
    policy: Policy, scopes: Sequence[Sequence[str]], seen: Set[str], name: str
) -> None:
    """Warns about patterns of kernels that match nothing in a program.

    Args:
        policy: The policy.
        scopes: As for `unmatched_kernels`.
        seen: The names of the functions that a rule could name.
        name: The name of the program.
    """
    if not (patterns := unmatched_kernels(policy, scopes)):
        return
    short = sorted({n.rpartition(".")[2] for n in seen if "<" not in n})
    found = did_you_mean(patterns[0].strip("*/."), [*short, *KNOWN])
    if not found:
        found = f" It calls {', '.join(short[:8])}." if short else " It calls no kernel."
    warnings.warn(
        f"{name} calls no function or kernel that matches {', '.join(map(repr, patterns))}: these "
        f"kernels of the policy do nothing.{found} A name is that of a function with a derivative "
        "rule, of a Pallas or FFI kernel, or a function's whole path, 'module.function'.",
        stacklevel=4,
    )
