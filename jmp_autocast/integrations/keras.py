"""A dtype policy for Keras 3 on JAX, which runs models in mixed precision and is saved with them.

The import of this module replaces ``keras.Model.stateless_call``, which ``fit``, ``evaluate`` and
``predict`` use. Models without the policy run as before. If this module is imported before Keras,
it chooses the JAX backend.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads this variable once

import keras
import numpy as np

from ..autocast import autocast as autocast_function
from ..call.options import autocast_options
from ..policies import BF16, Policy, PolicyLike, as_policy
from ..policies.errors import shown, wrong_type
from ..policies.toml_file import policy_fields, policy_text

__all__ = ["AutocastPolicy", "autocast"]

if keras.backend.backend() != "jax":
    raise ImportError(
        "jmp_autocast.integrations.keras needs Keras on JAX, and this Keras runs on "
        f"{keras.backend.backend()}. Set the environment variable KERAS_BACKEND=jax, or import it "
        "before Keras."
    )

Model = TypeVar("Model", bound=keras.Model)


@keras.saving.register_keras_serializable("jmp_autocast")
class AutocastPolicy(keras.dtype_policies.DTypePolicyMap):
    """The dtype policy of layers whose model runs in mixed precision.

    In Keras the layers compute in float32; `autocast` rewrites the program of the whole model. A
    saved layer holds the whole `Policy`, so that ``keras.models.load_model`` restores it if this
    module is imported. In a model with this dtype policy, a layer with the dtype policy
    ``"float32"`` stays in float32.

    Args:
        policy: A `Policy`, a string or dtype for one, such as ``"bfloat16"``, or a ``jmp.Policy``.
        policy_map: The dtype policies of single layers, by path. If ``layer.dtype_policy`` is
            assigned and the layer has this dtype policy, Keras adds an entry here.

    Raises:
        ValueError: A string describes no policy.
        TypeError: ``policy`` is no policy, or a rule of it is a function, which cannot be saved.

    Example:
        >>> from jmp_autocast.integrations.keras import AutocastPolicy
        >>> import keras
        >>> from jmp_autocast import BF16
        >>> policy = AutocastPolicy(BF16.with_rules({"*": "float32"}, scope="*/head"))
        >>> layer = keras.layers.Dense(4, dtype=policy)
        >>> layer.compute_dtype, layer.variable_dtype
        ('float32', 'float32')
        >>> config = keras.layers.serialize(layer)
        >>> keras.layers.deserialize(config).dtype_policy == policy
        True
    """

    # The base class is `DTypePolicyMap`. Of a dtype policy with any other base class, Keras would
    # restore only the name, and the `Policy` would be lost.

    def __init__(self, policy: Any = BF16, policy_map: Any = None) -> None:
        super().__init__("float32", policy_map)
        self._policy = as_policy(policy)
        self._text = policy_text(self._policy)

    @property
    def policy(self) -> Policy:
        """The policy that `autocast` runs the model under.

        Example:
            >>> from jmp_autocast.integrations.keras import AutocastPolicy
            >>> AutocastPolicy("bfloat16").policy
            Policy(bfloat16)
        """
        return self._policy

    @property
    def name(self) -> str:
        """The name of the dtype policy in Keras: the dtype of its layers.

        Example:
            >>> from jmp_autocast.integrations.keras import AutocastPolicy
            >>> AutocastPolicy("bfloat16").name
            'float32'
        """
        return "float32"

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration to save, with the text that `Policy.save` writes.

        Example:
            >>> from jmp_autocast.integrations.keras import AutocastPolicy
            >>> print(AutocastPolicy().get_config()["policy"].splitlines()[4])
            compute_dtype = "bfloat16"
        """
        others = keras.saving.serialize_keras_object(dict(self))
        return {"policy": self._text, "policy_map": others}

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> AutocastPolicy:
        """Returns the dtype policy from a saved configuration.

        Example:
            >>> from jmp_autocast.integrations.keras import AutocastPolicy
            >>> policy = AutocastPolicy("bfloat16")
            >>> AutocastPolicy.from_config(policy.get_config()) == policy
            True
        """
        fields = policy_fields(config["policy"].encode())
        others = keras.saving.deserialize_keras_object(config["policy_map"], custom_objects)
        return cls(Policy(**fields), others)

    def __eq__(self, other: object) -> bool:
        is_one = isinstance(other, AutocastPolicy)
        return is_one and (self.policy, dict(self)) == (other.policy, dict(other))

    def __bool__(self) -> bool:
        return True  # a map without entries is a policy, too

    def __repr__(self) -> str:
        return f"AutocastPolicy({self._policy!r})"


def autocast(model: Model, policy: PolicyLike = BF16, *, enabled: bool = True) -> Model:
    """Runs a Keras model in mixed precision, and saves the policy with it.

    The function gives an `AutocastPolicy` to all layers of the model, before or after ``compile``.
    For layers that are made later, call
    ``keras.config.set_dtype_policy(AutocastPolicy("bfloat16"))``.

    Args:
        model: The model, which is changed.
        policy: As in `jmp_autocast.autocast`, bfloat16 by default. For float16, compile the model
            with ``keras.optimizers.LossScaleOptimizer(...)``; without it, training warns.
        enabled: False gives all layers the dtype policy ``"float32"``.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is no Keras model, or a rule of the policy is a function, which cannot
            be saved.
        ValueError: An option has an invalid value.

    Example:
        >>> from jmp_autocast.integrations.keras import autocast
        >>> import keras
        >>> layers = [keras.layers.Input((8,)), keras.layers.Dense(4)]
        >>> model = autocast(keras.Sequential(layers), "bfloat16")
        >>> model.layers[0].dtype_policy.policy.compute_dtype
        dtype(bfloat16)
    """
    if not isinstance(model, keras.Model):
        fix = "Pass the model, or use jmp_autocast.autocast for a function."
        raise wrong_type("integrations.keras.autocast takes a keras.Model", model, fix)
    options = autocast_options(policy, enabled=enabled)
    dtype_policy = AutocastPolicy(options.policy) if enabled else _FLOAT32
    for layer in _layers(model):
        layer.dtype_policy = dtype_policy
    # Keras keeps compiled steps with the old policy. They are dropped, so that Keras compiles new
    # steps at the next call.
    model.train_function = model.test_function = model.predict_function = None
    return model


def _layers(layer: Any) -> Iterator[Any]:
    """Yields a layer and, if it is a model, all layers inside it."""
    yield layer
    for inner in getattr(layer, "layers", ()):
        yield from _layers(inner)


_FLOAT32 = keras.DTypePolicy("float32")


def _own(layer: Any) -> Any:
    """Returns a layer's dtype policy, or that policy's entry for the layer's path if it has one."""
    policy = layer.dtype_policy
    while isinstance(policy, AutocastPolicy) and layer.path in policy:
        policy = policy[layer.path]
    return policy


def _policy_of(model: Any) -> Policy | None:
    """Returns the policy that a model runs under; None for a model without an `AutocastPolicy`."""
    own = [(layer, _own(layer)) for layer in _layers(model)]
    ours = [(layer, policy.policy) for layer, policy in own if isinstance(policy, AutocastPolicy)]
    if not ours:
        return None
    first, policy = ours[0]
    for layer, other in ours:
        if other != policy:
            raise ValueError(
                f"A model runs under one policy, and layers of {model.name!r} have two: "
                f"{first.name!r} has {shown(policy)}, and {layer.name!r} has {shown(other)}. Write "
                f"one, such as BF16.with_rules({{'*': 'float32'}}, scope='*/{layer.name}')."
            )
    if len(ours) == 1 and first is model:  # only the model has a policy, no layer
        return policy
    # An inner model loses its dtype policy when it is saved, so only its layers are read.
    for layer, other in own:
        if layer.weights and not hasattr(layer, "layers") and other == _FLOAT32:
            policy = policy.with_rules({"*": "float32"}, scope=f"*/{layer.name}")
    return policy


def _check_scaled(model: Any, policy: Policy) -> None:
    """Warns if a training step in float16 is traced and its optimizer has no loss scale."""
    optimizer = getattr(model, "optimizer", None)
    is_scaled = optimizer is None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if policy.compute_dtype == np.float16 and not is_scaled:
        name = type(optimizer).__name__
        warnings.warn(
            f"{model.name} trains in float16, and its optimizer {name} scales no loss: small "
            "gradients become 0. Compile the model with keras.optimizers.LossScaleOptimizer("
            f"{name}(...)), or write autocast(model, 'bfloat16').",
            stacklevel=3,
        )


_plain_call = keras.Model.stateless_call


@functools.wraps(_plain_call)
def _stateless_call(
    self: Any, trainable_variables: Any, non_trainable_variables: Any, *args: Any, **kwargs: Any
) -> Any:
    arguments = self, trainable_variables, non_trainable_variables, *args
    policy = _policy_of(self)
    if policy is None:
        return _plain_call(*arguments, **kwargs)
    if kwargs.get("training"):
        _check_scaled(self, policy)
    return autocast_function(_plain_call, policy=policy, params=1)(*arguments, **kwargs)


keras.Model.stateless_call = _stateless_call
