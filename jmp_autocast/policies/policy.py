"""`Policy`: the immutable options that decide the dtypes of a program."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from jax.typing import DTypeLike

from .cast_policy import Rule
from .choices import LEVELS, Level, check_choice
from .dtypes import DEFAULT, FLOAT_DTYPES, as_compute_dtype, as_float_dtype
from .errors import did_you_mean, wrong_type
from .float8 import Float8, RecipeName, as_recipe
from .registry import function_hint, known_primitives, known_rule, primitive_name
from .retired import RETIRED, instead_of
from .rules import ANY, PolicyRule, as_rules, matches, said_of
from .toml_file import policy_fields, policy_text


@dataclasses.dataclass(frozen=True)
class Policy:
    """The options that decide the dtypes of a program.

    A policy is immutable and hashable: `with_rules` returns a new one.

    If several rules match an equation, the rule with the innermost scope wins, then a rule that
    names the primitive, then the later rule. ``full_precision()`` in the code is a rule for all
    primitives in its scope. A rule for ``"*"`` with a 16-bit dtype or ``"float8"`` competes only
    with other dtypes, and a rule with a precision only with other precisions; neither overrides a
    cast policy.

    Args:
        compute_dtype: ``float16`` or ``bfloat16``, the dtype of matmuls and convolutions.
            ``"default"`` depends on the default backend: float16 on GPUs whose tensor cores
            multiply float16 but not bfloat16 (V100, T4), else bfloat16. The choice is made when a
            program is traced; `save` writes the word ``"default"``.
        output_dtype: The dtype of the function's float32 and 16-bit outputs; None for the dtypes
            that the function declares. The option ``output_dtype`` of `autocast` wins over this
            one.
        level: Which operations are lowered, from the fewest to the most. ``"tensor_cores"``: only
            matmuls, convolutions and data movement of their results run in the compute dtype;
            everything else is float32. ``"o1"``, as in PyTorch: an operation without a fixed dtype
            follows its operands, and a float32 input of the program votes, which keeps a residual
            stream in float32. ``"compute"``: inputs of the program have no vote, so that a residual
            stream runs in the compute dtype. ``"by_hand"``: like ``"compute"``, and the gradients
            of weights are rounded to the compute dtype, as in a model with ``dtype=`` in each
            layer. Devices that sum gradients then send half the bytes.
        rules: Triples of a scope pattern, a primitive or ``"*"``, and a cast policy, dtype,
            precision or function. Use `with_rules` to add rules.
        matmul: A `Float8`, or the name of a recipe, ``"float8"`` or ``"float8_row"``, with which
            products of weights run in 8 bits. None for no products in 8 bits.

    Raises:
        ValueError: A dtype is not allowed, or a level or rule does not exist.
        TypeError: ``rules`` is no tuple of triples, or holds a wrong type.

    Example:
        >>> from jmp_autocast import BF16, Policy
        >>> Policy("bfloat16") == BF16
        True
        >>> policy = BF16.with_rules({"tanh": "float32"})
        >>> policy = policy.with_rules({"*": "float32"}, scope="*/LayerNorm_*")
    """

    compute_dtype: DTypeLike = DEFAULT
    output_dtype: DTypeLike | None = None
    level: Level = "o1"
    rules: tuple[PolicyRule, ...] = ()
    matmul: Float8 | RecipeName | None = None

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **kwargs: Any) -> Policy:
            """Raises TypeError with the replacement of a retired option."""
            for option in kwargs:
                if option in RETIRED:
                    raise TypeError(f"Policy takes no {option}=.{instead_of(option)}")
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError with the replacement of a retired method."""
            hint = instead_of(name)
            raise AttributeError(f"Policy has no {name!r}.{hint}", name=name, obj=self)

    def __post_init__(self) -> None:
        set_field = functools.partial(object.__setattr__, self)
        set_field("compute_dtype", as_compute_dtype(self.compute_dtype))
        check_choice("level", self.level, LEVELS)
        if self.output_dtype is not None:
            dtype = as_float_dtype(self.output_dtype, "output_dtype", FLOAT_DTYPES)
            set_field("output_dtype", dtype)
        # Rules are checked here and not in `with_rules`, because a policy may also come from its
        # constructor or a file.
        set_field("rules", as_rules(self.rules))
        set_field("matmul", as_recipe(self.matmul))

    def __repr__(self) -> str:
        """Returns the constructor call, with the fields that differ from the defaults."""
        first, *others = dataclasses.fields(self)
        changed = [
            f"{field.name}={value.name if isinstance(value, np.dtype) else value!r}"
            for field in others
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"Policy({', '.join([str(getattr(self, first.name)), *changed])})"

    def with_rules(self, rules: Mapping[Any, Any], *, scope: str = ANY) -> Policy:
        """Returns a policy with rules added after the rules of this policy.

        A scope is a glob (as in `fnmatch`) over the names that ``jax.named_scope`` put around an
        equation, joined by ``/``. Flax linen and Haiku put module paths there, for example
        ``Transformer/layer_0/LayerNorm_0``. A match covers everything inside the scope. ``"*"``
        covers the whole program, including equations in no scope. A pattern that matches nothing
        makes `autocast` warn.

        Args:
            rules: From a primitive, its name, or ``"*"`` for all, to one of:

                * a `CastPolicy` or its name, such as ``"FP32"``;
                * ``"float32"``: the primitive runs in float32. For ``"*"``, nothing in the scope is
                  lowered, as in `full_precision`;
                * a 16-bit dtype: the primitive runs in this dtype. For ``"*"``, the dtype is the
                  compute dtype of the scope;
                * ``"float8"``: products of weights run in 8 bits, even those that ``Float8.skip``
                  leaves out;
                * a precision, for products that stay float32 and have none in the program:
                  a ``lax.Precision``, a ``lax.DotAlgorithmPreset`` with float32 operands, or
                  a name, such as ``"highest"`` or ``"tf32_tf32_f32"``. GPUs may multiply float32 in
                  TF32, and TPUs multiply it in bfloat16. Convolutions take no algorithm;
                * a rule function of an `EquationView` that returns a policy or a `Decision`.
            scope: The pattern of the scopes in which the rules hold.

        Returns:
            The new policy; a rule given earlier for the same primitive and scope is replaced.

        Raises:
            ValueError: A primitive, policy, dtype or precision is unknown; the nearest match is
                named.
            TypeError: A key, rule or scope has the wrong type.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.with_rules({"tanh": "float32"}).rules
            (('*', 'tanh', <CastPolicy.FP32: 'fp32'>),)
            >>> BF16.with_rules({"*": "float32"}, scope="*/LayerNorm_*").rules
            (('*/LayerNorm_*', '*', dtype('float32')),)
        """
        if not isinstance(rules, Mapping):
            raise wrong_type(
                "rules must be a mapping", rules, "Write with_rules({'tanh': 'float32'})."
            )
        known = known_primitives()
        added = []
        for primitive, what in rules.items():
            # Only a name is checked, because it may be misspelled. A primitive object is valid even
            # if no table has it.
            name = primitive_name(primitive)
            if isinstance(primitive, str) and name not in known and name != ANY:
                hint = function_hint(name) or did_you_mean(name, known)
                if "/" in name or "*" in name:
                    hint = f" A scope is given by scope=: with_rules({{'*': ...}}, scope={name!r})."
                raise ValueError(
                    f"Unknown primitive {name!r} in with_rules.{hint} For a primitive of another "
                    "package pass the primitive object, or call register_rule first."
                )
            added.append((scope, name, what))
        return dataclasses.replace(self, rules=(*self.rules, *added))

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the policy to a TOML file that a person can read and change.

        The file names the version of this package's default rules. Rules of `register_rule` are not
        part of a policy, and are not saved.

        Args:
            path: The file.

        Raises:
            TypeError: A rule is a function, which a file cannot hold; or ``path`` is neither a
                string nor a ``pathlib.Path``.
            ValueError: A name or pattern holds half of a surrogate pair, which UTF-8 cannot encode.
            OSError: The file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> from jmp_autocast import BF16
            >>> policy = BF16.with_rules({"*": "float32"}, scope="*/ln")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "policy.toml")
            ...     policy.save(path)
            ...     lines = path.read_text().splitlines()
            >>> [line for line in lines if "ln" in line]
            ['    ["*/ln", "*", "float32"],']
        """
        pathlib.Path(path).write_bytes(policy_text(self).encode())

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        r"""Reads a policy from a TOML file, as `save` writes it.

        ``version`` and ``compute_dtype`` are required; other keys default to the values of
        ``Policy(compute_dtype)``. Nothing in the file is run, imported or registered, and the
        primitives that it names need not exist. If the file was saved under another version of the
        default rules, the method warns: some equations may have other dtypes now.

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
            ...     _ = path.write_text("version = 2\ncompute_dtype = 'bfloat16'")
            ...     policy = Policy.load(path)
            >>> policy == Policy("bfloat16")
            True
        """
        content = pathlib.Path(path).read_bytes()
        try:
            return cls(**policy_fields(content))
        except (TypeError, ValueError) as error:
            raise type(error)(f"Policy file {str(path)!r}: {error}") from None

    @property
    def data_abstains(self) -> bool:
        """Whether inputs of the program do not affect the dtypes of elementwise operations.

        Example:
            >>> from jmp_autocast import BF16, Policy
            >>> BF16.data_abstains, Policy(level="by_hand").data_abstains
            (False, True)
        """
        return self.level in ("compute", "by_hand")

    @property
    def rounds_weight_gradients(self) -> bool:
        """Whether a matmul rounds the gradient of a weight to the compute dtype.

        Example:
            >>> from jmp_autocast import BF16, Policy
            >>> BF16.rounds_weight_gradients, Policy(level="by_hand").rounds_weight_gradients
            (False, True)
        """
        return self.level == "by_hand"

    def rule_for(self, primitive: str, names: Sequence[str] = ()) -> tuple[Rule, str]:
        """Returns the rule that decides for a primitive, and its origin.

        Args:
            primitive: The primitive's name.
            names: The enclosing scopes, outermost first.

        Returns:
            The rule, and its origin: ``"rules"``, ``"registered"``, ``"default"`` or ``"unknown"``.

        Example:
            >>> from jmp_autocast import BF16
            >>> BF16.rule_for("exp")
            (<CastPolicy.FP32: 'fp32'>, 'default')
        """
        rule = said_of(matches(self.rules, names), primitive).rule
        return known_rule(primitive) if rule is None else (rule, "rules")


# `inspect.signature` shows the fields, and not the arguments of `__new__`, which only collect
# mistakes.
_signature = inspect.signature(Policy.__init__)
setattr(  # noqa: B010
    Policy, "__signature__", _signature.replace(parameters=[*_signature.parameters.values()][1:])
)


FP16 = Policy("float16")
"""float16 compute; its gradients underflow without loss scaling."""

BF16 = Policy("bfloat16")
"""bfloat16 compute, with the range of float32 and 8 bits of precision; needs no loss scaling."""

FP8 = Policy("bfloat16", matmul="float8")
"""bfloat16 compute, with products of weights in float8, for GPUs and TPUs with 8-bit units."""
