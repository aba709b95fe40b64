"""`Float8`, the recipe for matrix products of weights in 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from .choices import check_choice, elsewhere
from .dtypes import find_dtype
from .errors import wrong_type

E4M3 = np.dtype(jnp.float8_e4m3fn)
"""The format of weights and activations: 4 bits of precision, numbers up to 448."""

E5M2 = np.dtype(jnp.float8_e5m2)
"""The format of gradients, which need a wider range: 3 bits of precision, numbers up to 57,344."""

FLOAT8 = "float8"
"""The name of the default recipe in strings and files; the value of a rule may be this name."""

Gradient = Literal["e5m2", "e4m3"]
WeightGradient = Literal["float8", "compute"]
Scaling = Literal["tensor", "row"]
Skip = Literal["last"]
RecipeName = Literal["float8", "float8_row"]


@dataclasses.dataclass(frozen=True)
class Float8:
    """A recipe for products of a weight and an activation in 8 bits.

    Each operand is multiplied by a scale, the power of two that brings its largest element just
    below the largest float8 number, and rounded to 8 bits. The product is multiplied by the inverse
    scales. Scales are computed from the current values, so there is no state to keep. Products of
    two activations, convolutions and sums stay in the compute dtype.

    Args:
        gradient: The format of cotangents, ``"e5m2"`` or ``"e4m3"``. Weights and activations are
            always e4m3 (float8_e4m3fn).
        wgrad: How the gradient of a weight is computed. ``"float8"``: as a product of 8-bit
            operands; the activation is kept in 8 bits for the backward pass. ``"compute"``: as a
            product in the compute dtype; the activation is kept in 16 bits. The gradient is float32
            in both cases.
        minimum: The smallest input and output size of a weight whose products run in 8 bits.
            Smaller weights gain little or lose, because quantizing takes a pass over each operand:
            an H100 gains 7 % at 2048 x 768 x 3072, by estimate.
        multiple: All three sizes of a product must be multiples of this number. GPUs pad other
            sizes to multiples of 16.
        skip: ``("last",)``: a product whose result reaches no other matrix product, such as that of
            the logits, stays in the compute dtype. ``()``: no product is skipped.
        emulate: True rounds to 8 bits on every backend, for studies. An optimization barrier keeps
            XLA from removing the pair of casts to 8 bits and back.
        scaling: ``"tensor"``: one scale for an array. ``"row"``: one scale for each token of an
            activation and each output of a weight, so that an outlier reduces the precision of its
            own row only. Row scales cost a GPU one more kernel for each product.

    Raises:
        ValueError: An option has an invalid value, or a size is not positive.
        TypeError: A size is no integer, ``skip`` no sequence of words, or ``emulate`` no bool.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import Float8, Policy
        >>> Policy(jnp.bfloat16, matmul="float8").matmul == Float8()
        True
        >>> Policy(jnp.bfloat16, matmul=Float8(wgrad="compute")).matmul.wgrad
        'compute'
    """

    gradient: Gradient = "e5m2"
    wgrad: WeightGradient = "float8"
    minimum: int = 1024
    multiple: int = 16
    skip: tuple[Skip, ...] = ("last",)
    emulate: bool = False
    scaling: Scaling = "tensor"

    def __post_init__(self) -> None:
        check_choice("Float8.gradient", self.gradient, get_args(Gradient))
        check_choice("Float8.wgrad", self.wgrad, get_args(WeightGradient))
        check_choice("Float8.scaling", self.scaling, get_args(Scaling))
        for name in ("minimum", "multiple"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                fix = "Write one, such as 16."
                raise wrong_type(f"Float8.{name} must be an integer", value, fix)
            if value < 1:
                raise ValueError(f"Float8.{name} must be at least 1, got {value}.")
        if isinstance(self.skip, str) or not isinstance(self.skip, Sequence):
            fix = "Write skip=('last',), or skip=() to skip none."
            raise wrong_type("Float8.skip must be a tuple of words", self.skip, fix)
        for word in self.skip:
            check_choice("Float8.skip", word, get_args(Skip))
        object.__setattr__(self, "skip", tuple(self.skip))
        if not isinstance(self.emulate, bool):
            raise wrong_type("Float8.emulate must be a bool", self.emulate)

    @property
    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name.

        Example:
            >>> from jmp_autocast import Float8
            >>> Float8(minimum=512).changed
            {'minimum': 512}
        """
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {field.name: value for field, value in values.items() if value != field.default}

    @property
    def gradient_dtype(self) -> np.dtype:
        """The dtype of cotangents.

        Example:
            >>> from jmp_autocast import Float8
            >>> Float8().gradient_dtype
            dtype(float8_e5m2)
        """
        return E5M2 if self.gradient == "e5m2" else E4M3


RECIPES: dict[str, Float8] = {
    FLOAT8: Float8(),
    "float8_row": Float8(scaling="row"),
}
"""The recipes that have a name."""


def as_recipe(value: Any) -> Float8 | None:
    """Returns the recipe for a value of ``Policy(matmul=...)``: a `Float8`, its name, or None.

    Example:
        >>> as_recipe("float8").gradient, as_recipe("float8_row").scaling
        ('e5m2', 'row')
    """
    if value is None or isinstance(value, Float8):
        return value
    if isinstance(value, str):
        check_choice("matmul", value, tuple(RECIPES))
        return RECIPES[value]
    dtype = find_dtype(value)
    fix = "" if dtype is None else elsewhere("matmul", dtype.name).lstrip()
    fix = fix or "Pass matmul='float8', or Float8(...) with options."
    raise wrong_type("matmul must be a Float8, the name of a recipe or None", value, fix)


def may_use_float8(policy: Any) -> bool:
    """Returns whether a policy has products in 8 bits, for the whole program or for a scope.

    Example:
        >>> from jmp_autocast import BF16
        >>> may_use_float8(BF16), may_use_float8(BF16.with_rules({"*": "float8"}, scope="*/mlp"))
        (False, True)
    """
    words = (what for _, _, what in policy.rules if isinstance(what, str))
    return policy.matmul is not None or FLOAT8 in words
