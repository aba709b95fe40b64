"""`Policy`: the immutable value that says how a program is cast."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, cast

import numpy as np
from jax.typing import DTypeLike

from .cast_policy import CastPolicy, Rule
from .choices import WORDS, DotOutput, Level, WeightGradients, check_choice
from .containers import as_mapping, as_tuples, as_words
from .dtypes import DEFAULT, FLOAT_DTYPES, as_compute_dtype, as_float_dtype
from .errors import did_you_mean
from .float8 import Float8, RecipeName, as_recipe, as_scope_dtype
from .formats import Emulated
from .kernels import KernelWord, check_kernel
from .patterns import check_pattern, match_depth, matching
from .precisions import as_precision
from .registry import (
    as_rule,
    known_primitives,
    made_of,
    primitive_name,
    registered_rule,
)
from .storage import StorageWord, check_storage
from .tables import DEFAULT_RULES
from .toml_file import read_policy, write_policy


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a program is cast: the compute dtype, and the rules and scopes of one program.

    Immutable and hashable: `with_rules` and `with_scopes` return a new policy.

    Args:
        compute_dtype: ``float16`` or ``bfloat16``, the dtype of matmuls and convolutions.
            ``"default"``: the 16 bits that the default backend multiplies, float16 on GPUs with
            tensor cores for it alone (V100, T4), bfloat16 on all others. It is asked when a program
            is traced, and `save` keeps the word.
        output_dtype: The dtype of the function's float32 or 16-bit outputs, None for the dtype
            that the function declares.
        level: How much is lowered, from the most careful to the leanest; see `with_level`.
        dot_output: ``"consumer"``: a matmul or convolution that is read only in float32 returns its
            float32 accumulator, and the gradient of a leaf that it reads is an accumulator, too.
            ``"compute"``: results are rounded, and the gradients of leaves that matmuls read are
            accumulators.
        rules: Pairs of primitive name and rule; build it with `with_rules`.
        scopes: Pairs of scope pattern and dtype; build it with `with_scopes`.
        scoped_rules: Triples of pattern, primitive name and rule; build it with `with_rules`.
        weight_gradients: The dtype in which a matmul returns the gradient of a weight, and in which
            devices add it up under data parallelism. ``"float32"``: its accumulator. ``"compute"``:
            rounded to the compute dtype, for half the bytes between devices.
        precisions: Pairs of scope pattern and precision; build it with `with_precision`.
        kernels: Pairs of the name or pattern of a function and a word; build it with
            `with_kernels`.
        storage: Pairs of a pattern of paths and a word; build it with `with_storage`.
        matmul: A `Float8`, or the name of one, ``"float8"`` or ``"float8_row"``: products
            of weights run in 8 bits; None: none do.

    Raises:
        ValueError: A dtype is not one of those allowed, or there is no such level or policy.
        TypeError: ``rules`` or ``scopes`` is no tuple of pairs, or holds a wrong type.

    Example:
        >>> from jmp_autocast import BF16, Policy
        >>> Policy("bfloat16") == BF16
        True
        >>> policy = BF16.with_rules({"tanh": "FP32"}).with_scopes({"*/LayerNorm_*": "float32"})
    """

    compute_dtype: DTypeLike = DEFAULT
    output_dtype: DTypeLike | None = None
    level: Level = "o1"
    dot_output: DotOutput = "compute"
    rules: tuple[tuple[str, Rule], ...] = ()
    scopes: tuple[tuple[str, np.dtype | Emulated | Literal["float8"]], ...] = ()
    scoped_rules: tuple[tuple[str, str, Rule], ...] = ()
    weight_gradients: WeightGradients = "float32"
    precisions: tuple[tuple[str, str], ...] = ()
    matmul: Float8 | RecipeName | None = None
    kernels: tuple[tuple[str, str], ...] = ()
    storage: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        set_field = functools.partial(object.__setattr__, self)
        set_field("compute_dtype", as_compute_dtype(self.compute_dtype))
        if self.output_dtype is not None:
            dtype = as_float_dtype(self.output_dtype, "output_dtype", FLOAT_DTYPES)
            set_field("output_dtype", dtype)
        for option, allowed in WORDS.items():
            check_choice(option, getattr(self, option), allowed)
        set_field("matmul", as_recipe(self.matmul))
        # Rules are read here and not in `with_rules`, so that a policy made by hand or from a file
        # is checked. As in `with_rules` a later rule replaces one for the same primitive.
        rules = [(primitive_name(name), rule) for name, rule in as_tuples(self.rules, "rules", 2)]
        read = {name: as_rule(rule, name) for name, rule in rules}
        set_field("rules", tuple(read.items()))
        pairs = as_tuples(self.scopes, "scopes", 2)
        scopes = ((check_pattern(p), as_scope_dtype(d, f"scopes[{p!r}]")) for p, d in pairs)
        set_field("scopes", tuple(scopes))
        scoped: dict[tuple[str, str], Rule] = {}
        for pattern, name, rule in as_tuples(self.scoped_rules, "scoped_rules", 3):
            key = check_pattern(pattern), primitive_name(name)
            # Unlike those of the whole program, scoped rules depend on their order: of those that
            # match at one depth the last wins, so that a rule given again moves to the end.
            scoped.pop(key, None)
            scoped[key] = as_rule(rule, name)
        words = as_tuples(self.precisions, "precisions", 2)
        words = ((check_pattern(p), as_precision(w, f"precisions[{p!r}]")) for p, w in words)
        set_field("precisions", tuple(dict(words).items()))
        kernels = [check_kernel(*pair) for pair in as_tuples(self.kernels, "kernels", 2)]
        set_field("kernels", tuple(dict(kernels).items()))
        storage = [check_storage(*pair) for pair in as_tuples(self.storage, "storage", 2)]
        set_field("storage", tuple(dict(storage).items()))
        set_field("scoped_rules", tuple((*key, rule) for key, rule in scoped.items()))

    def __repr__(self) -> str:
        """Returns the call that makes it, with what differs from the defaults."""
        first, *others = dataclasses.fields(self)
        changed = [
            f"{field.name}={value.name if isinstance(value, np.dtype) else value!r}"
            for field in others
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"Policy({', '.join([str(getattr(self, first.name)), *changed])})"

    def with_level(self, level: Level) -> Policy:
        """Returns a policy that lowers more, or less, of the program.

        Args:
            level: ``"tensor_cores"``: only matmuls, convolutions and data movement of their results
                run in the compute dtype; everything else is float32. ``"o1"``, the default:
                operations without a fixed dtype follow their operands, and a float32 input of the
                program counts as one, which is PyTorch's rule and keeps a residual stream in
                float32. ``"compute"``: inputs of the program do not count, so that a residual
                stream runs in the compute dtype, as in a model whose author passed ``dtype=`` to
                each layer.

        Returns:
            The new policy.

        Raises:
            ValueError: There is no such level.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.with_level("compute").level
            'compute'
        """
        return dataclasses.replace(self, level=level)

    def with_rules(self, rules: Mapping[Any, Rule | str], *, scope: str | None = None) -> Policy:
        """Returns a policy with rules added for single primitives.

        They beat every registration and default; those for a scope beat those for all, and
        `with_scopes` beats both.

        Args:
            rules: From a primitive, or its name, to a `CastPolicy`, its name, ``"float32"`` (which
                is ``FP32``), or a rule function of an `EquationView` that returns a policy or
                `Decision`.
            scope: A pattern as in `with_scopes`: the rules hold inside the scopes that match it.
                Of several the innermost wins. None for the whole program.

        Returns:
            The new policy; a rule given earlier for the same primitive and scope is replaced.

        Raises:
            ValueError: A primitive or policy name is unknown; the nearest match is named.
            TypeError: A key, rule or scope has the wrong type.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.with_rules({"tanh": "FP32"}).rules
            (('tanh', <CastPolicy.FP32: 'fp32'>),)
            >>> BF16.with_rules({"dot_general": "FP32"}, scope="*/head").scoped_rules
            (('*/head', 'dot_general', <CastPolicy.FP32: 'fp32'>),)
        """
        merged: dict[str, Rule] = {}
        for primitive, value in as_mapping(rules, "rules").items():
            # A name may be misspelled; an object is what it is, also if no table knows it yet.
            name = primitive_name(primitive)
            if isinstance(primitive, str) and name not in known_primitives():
                hint = made_of(name) or did_you_mean(name, known_primitives())
                raise ValueError(
                    f"Unknown primitive {name!r} in with_rules.{hint} For a primitive of another "
                    "package pass the primitive object, or call register_rule first."
                )
            merged[name] = cast(Rule, value)  # read when the new policy is made
        if scope is None:
            return dataclasses.replace(self, rules=tuple((dict(self.rules) | merged).items()))
        added = tuple((scope, name, rule) for name, rule in merged.items())
        return dataclasses.replace(self, scoped_rules=(*self.scoped_rules, *added))

    def with_scopes(self, scopes: Mapping[str, DTypeLike | Emulated]) -> Policy:
        """Returns a policy in which named scopes compute in a given dtype.

        A pattern is a glob (as in `fnmatch`) over the names that ``jax.named_scope`` put around an
        equation, joined by ``/``. Flax linen and Haiku put module paths there, for example
        ``Transformer/layer_0/LayerNorm_0``. A match covers everything inside the scope. The
        innermost matching scope wins; ``with full_precision():`` in the code counts as one. ``"*"``
        covers the whole program, including equations in no scope. A pattern that matches nothing
        makes `autocast` warn.

        Args:
            scopes: From a pattern to ``"float32"`` (nothing is lowered), to a compute dtype, to
                ``"float8"``: products of weights run in 8 bits, the last one too; to a number
                format such as ``"e4m3"`` or ``"e5m7"``, or an `Emulated` with options: the operands
                of products are rounded to it, emulated in float32.

        Returns:
            The new policy; later patterns win over earlier ones at the same depth.

        Raises:
            ValueError: A dtype is none of these.
            TypeError: A pattern is no string.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.with_scopes({"*/LayerNorm_*": "float32"}).scopes
            (('*/LayerNorm_*', dtype('float32')),)
        """
        added = as_mapping(scopes, "scopes").items()
        return dataclasses.replace(self, scopes=_followed_by(self.scopes, added))

    def with_precision(self, precision: Any, *, scope: str = "*") -> Policy:
        """Returns a policy that says how float32 products are computed.

        GPUs may multiply float32 in TF32, and TPUs multiply it in bfloat16. The precision applies
        to all matmuls and convolutions that stay float32, by rule or by scope, and for which the
        program itself asks for no precision.

        Args:
            precision: A ``lax.Precision`` or ``lax.DotAlgorithmPreset`` with float32 operands, or
                its name: ``"highest"``, ``"tf32_tf32_f32"``, ``"bf16_bf16_f32_x3"``. Convolutions
                take no algorithm.
            scope: A pattern as in `with_scopes`: the innermost wins. ``"*"``: the whole program.

        Returns:
            The new policy.

        Raises:
            ValueError: There is no such precision; the nearest match is named.
            TypeError: An argument has the wrong type.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, autocast
            >>> policy = BF16.with_scopes({"physics": "float32"}).with_precision("highest")
            >>> @autocast(policy=policy)
            ... def fn(x):
            ...     with jax.named_scope("physics"):
            ...         return x @ x
            >>> "HIGHEST" in str(jax.make_jaxpr(fn)(jnp.ones((8, 8))))
            True
        """
        added = [(check_pattern(scope), precision)]
        return dataclasses.replace(self, precisions=_followed_by(self.precisions, added))

    def with_kernels(self, kernels: Mapping[str, KernelWord] | str | Sequence[str]) -> Policy:
        """Returns a policy that says which kernels run with 16-bit operands.

        A kernel was written for the dtypes of its operands, and keeps float32 unless its name
        stands here. Then its function is traced anew, with float32 operands in the compute dtype,
        also inside ``vmap``, ``shard_map``, loops and checkpoints; what it returns to the program
        has the declared dtype, and is 16 bits where that serves its readers. This concerns
        functions with a rule of their own (``custom_vjp``, ``custom_jvp``, ``custom_vmap``,
        ``custom_partitioning``), and kernels (``pallas_call``, ``ffi_call``, ``composite``). Of one
        that calls another the outer decides.

        A name is one of `jmp_autocast.policies.kernels.KNOWN` (``"splash"``, ``"flash"``,
        ``"megablox"``, ``"attention"``, ``"tokamax"``, ``"ragged_dot"``), or a glob over the
        function's name, its path (``module.function``), or the scopes around it, up to the
        innermost loop, joined by ``/``. A whole path without ``*`` names any function, as its
        callers find it. ``full_precision()`` in the code wins over it.

        Args:
            kernels: From a name to a word. ``"compute"``: it runs with operands in the compute
                dtype, and its error is raised if it refuses them.
                ``"compute_or_declared"``: it then runs in float32. ``"declared"``: it keeps its
                dtypes. A name, or several, is ``"compute"``.

        Returns:
            The new policy; of names that match one function the last wins.

        Raises:
            ValueError: There is no such word.
            TypeError: A name is no string.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.with_kernels(["splash", "*my_attention*"]).kernels
            (('splash', 'compute'), ('*my_attention*', 'compute'))
        """
        added = as_words(kernels, "kernels").items()
        return dataclasses.replace(self, kernels=_followed_by(self.kernels, added))

    def with_storage(self, storage: Mapping[str, StorageWord] | str | Sequence[str]) -> Policy:
        """Returns a policy that stores some arguments, results and carries in 16 bits.

        A cache of keys and values, or activations that one stage hands to the next, take half the
        memory. An argument may be given in the compute dtype, and is float32 to the program; one
        given in float32 is rounded. What the program writes into it (``dynamic_update_slice``, a
        scatter, a select) is rounded too, loops carry it in 16 bits, and it is returned so. This is
        the one case in which results have another dtype than the program declares.

        A pattern is a glob over paths, as in `with_scopes`, and covers all below: of an argument
        its position or name, then the keys (``1/layers/0/k``, ``cache/layers/0/k``); of a result
        ``result``, then the keys; of a carry its name in the function of the loop's body, then the
        keys (``carry/1``).

        Args:
            storage: From a pattern to ``"compute"``: stored in the compute dtype; or
                ``"declared"``: it is not. A pattern, or several, is ``"compute"``.

        Returns:
            The new policy; of patterns that match one path the last wins.

        Raises:
            ValueError: There is no such word.
            TypeError: A pattern is no string.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jmp_autocast import BF16, autocast
            >>> @autocast(policy=BF16.with_storage("cache"))
            ... def step(params, cache, x):
            ...     return jax.lax.dynamic_update_slice(cache, x @ params["w"], (0, 0))
            >>> params, x = {"w": jnp.ones((4, 4))}, jnp.ones((1, 4))
            >>> step(params, jnp.zeros((8, 4), jnp.bfloat16), x).dtype
            dtype(bfloat16)
        """
        added = as_words(storage, "storage").items()
        return dataclasses.replace(self, storage=_followed_by(self.storage, added))

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the policy to a TOML file that a person can read and change.

        The file is replaced as a whole: after a failure the old file is still there. It names the
        version of the rules that the policy was made with. Registrations of `register_rule` are
        not part of a policy, and are not saved.

        Args:
            path: The file.

        Raises:
            TypeError: A rule is a function, which a file of data cannot hold; or ``path`` is
                neither a string nor a ``pathlib.Path``.
            ValueError: A name or pattern holds half of a surrogate pair, which TOML cannot; or
                ``path`` is there and no regular file.
            OSError: The file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> from jmp_autocast import BF16
            >>> policy = BF16.with_rules({"tanh": "FP32"}).with_scopes({"*/ln": "float32"})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "policy.toml")
            ...     policy.save(path)
            ...     lines = path.read_text().splitlines()
            >>> [line for line in lines if "dtype =" in line]
            ['compute_dtype = "bfloat16"', 'dtype = "float32"']
        """
        write_policy(vars(self), path)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        r"""Reads a policy from a TOML file, as `save` writes it.

        ``version`` and ``compute_dtype`` are required; other keys default to those of
        ``Policy(compute_dtype)``. Nothing in the file is run, imported or registered, and the
        primitives that it names need not exist. A file that was saved under other rules than those
        of this package warns: some equations may have other dtypes now.

        Args:
            path: The file.

        Returns:
            The policy, equal to the one that was saved.

        Raises:
            ValueError: The file is not UTF-8 or not TOML, its version is missing or newer than
                this package, or a key, policy, dtype or level is unknown; the nearest match is
                named.
            TypeError: A value has the wrong type, or ``path`` is neither a string nor a
                ``pathlib.Path``.
            OSError: The file cannot be read.

        Example:
            >>> import pathlib, tempfile
            >>> from jmp_autocast import Policy
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "policy.toml")
            ...     _ = path.write_text("version = 1\ncompute_dtype = 'bfloat16'")
            ...     policy = Policy.load(path)
            >>> policy == Policy("bfloat16")
            True
        """
        fields = read_policy(path)
        try:
            return cls(**fields)
        except ValueError as error:  # what is right alone, and not beside the compute dtype
            raise ValueError(f"Policy file {str(path)!r}: {error}") from None

    @functools.cached_property
    def _rule_map(self) -> dict[str, Rule]:
        return dict(self.rules)

    @property
    def data_abstains(self) -> bool:
        """Whether full-size inputs of the program have no vote in the dtype of their readers.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.data_abstains, BF16.with_level("compute").data_abstains
            (False, True)
        """
        return self.level == "compute"

    def rule_for(self, primitive: str, scoped: Sequence[tuple[str, Rule]] = ()) -> tuple[Rule, str]:
        """Returns the rule of a primitive and where it is from.

        Args:
            primitive: The primitive's name.
            scoped: What `rules_in` says of the scope that the equation is in.

        Returns:
            The rule, and ``"rules"``, ``"registered"``, ``"default"`` or ``"unknown"``.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.rule_for("exp")
            (<CastPolicy.FP32: 'fp32'>, 'default')
        """
        # The innermost scope says most about where the equation stands; a table knows only what it
        # is.
        for name, rule in scoped:
            if name == primitive:
                return rule, "rules"
        if (rule := self._rule_map.get(primitive)) is not None:
            return rule, "rules"
        if (rule := registered_rule(primitive)) is not None:
            return rule, "registered"
        if (rule := DEFAULT_RULES.get(primitive)) is not None:
            return rule, "default"
        return CastPolicy.KEEP, "unknown"

    def scope_matches(self, names: Sequence[str]) -> list[tuple[int, str, Any]]:
        """Returns, for each pattern that matches, the depth at which it does.

        Args:
            names: The enclosing scopes, outermost first.

        Returns:
            Triples (depth, pattern, dtype); depth is the length of the shortest prefix of
            ``names`` that matches.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.with_scopes({"*/ln": "float32"}).scope_matches(["net", "ln", "mul"])
            [(2, '*/ln', dtype('float32'))]
        """
        found = ((match_depth(pattern, names), pattern, dtype) for pattern, dtype in self.scopes)
        return [(depth, pattern, dtype) for depth, pattern, dtype in found if depth is not None]

    def rules_in(self, names: Sequence[str]) -> tuple[tuple[str, Rule], ...]:
        """Returns the rules that a scope adds, as pairs of primitive and rule.

        Args:
            names: The enclosing scopes, outermost first.

        Example:
            >>> from jmp_autocast import BF16
            >>> policy = BF16.with_rules({"dot_general": "FP32"}, scope="*/head")
            >>> policy.rules_in(["net", "head"])
            (('dot_general', <CastPolicy.FP32: 'fp32'>),)
        """
        found = matching(self.scoped_rules, names)
        return tuple({name: rule for _, name, rule in found}.items())


def _followed_by(pairs: Sequence[tuple[str, Any]], added: Iterable[tuple[str, Any]]) -> Any:
    """Returns pairs with others behind them. What is given again moves there: the last one holds.

    Args:
        pairs: Those of a policy, which are checked.
        added: Those of the user, which are checked when the new policy is made.
    """
    new = dict(added)
    return (*(pair for pair in pairs if pair[0] not in new), *new.items())
