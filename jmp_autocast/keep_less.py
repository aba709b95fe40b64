"""`keep_less`: a function transform that plans the residuals of the backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from .autocast import Autocast
from .call import arguments
from .call.outputs import as_traced
from .call.wrapping import Wrapper, wrapper_of
from .interpreters.compat import body_of, fresh_make_jaxpr, mark_frames
from .interpreters.keep.choice import ResidualChoice, Residuals, as_choice
from .interpreters.keep.emit import run_planned
from .policies.callables import name_of

mark_frames(__file__)

F = TypeVar("F", bound=Callable[..., Any])


@overload
def keep_less(
    fn: F,
    *,
    residuals: Residuals = ...,
    keep_scopes: Sequence[str] = ...,
    params: arguments.Params = ...,
) -> F: ...
@overload
def keep_less(
    fn: None = ...,
    *,
    residuals: Residuals = ...,
    keep_scopes: Sequence[str] = ...,
    params: arguments.Params = ...,
) -> Callable[[F], F]: ...
def keep_less(
    fn: Callable[..., Any] | None = None,
    *,
    residuals: Residuals = "auto",
    keep_scopes: Sequence[str] = (),
    params: arguments.Params = None,
) -> Any:
    """Keeps fewer bytes for the backward pass, and computes cheap values again instead.

    A minimum cut over the traced program chooses the values to keep: results of matmuls and
    convolutions, the residual stream, and small statistics. Elementwise operations between them
    (norms, activations, softmaxes, masks, casts) are computed again in the backward pass; a matmul
    or convolution never is. The function computes the same values, in the dtypes that it declares.
    It may be any function, in float32 or in mixed precision, such as the result of `autocast`.

    These are never computed again: random bits, gathers, sorts, collectives, equations with effects
    or with a derivative rule of their own, values that are named for a `jax.checkpoint` policy, and
    everything inside a `jax.checkpoint` of the user.

    Args:
        fn: The function, before it is differentiated: the loss, not its gradient. Arrays in its
            arguments are traced, all other leaves are static. None to use ``keep_less`` as a
            decorator with options.
        residuals: ``"auto"`` plans the bodies of ``jax.lax.scan``, where measurements show that it
            pays; elsewhere XLA computes cheap values again by itself under ``jit``. ``"recompute"``
            plans the whole program, for programs that run without ``jit``. A share from 0 to 1 also
            plans the whole program: it keeps at most that share of the bytes that derivatives read,
            with as little recomputation as possible. If the share is out of reach, it keeps as few
            bytes as possible. ``"declared"`` changes nothing.
        keep_scopes: Patterns of ``jax.named_scope`` names, as in `Policy.with_rules`, in which
            nothing is computed again.
        params: Which arguments hold parameters, as for `autocast`. Parameters, even moved or cast,
            are in memory anyway. Leave ``params`` out if ``fn`` is a result of `autocast`, which
            has its own.

    Returns:
        The function, to be differentiated; with ``fn=None`` a decorator. Equal functions and
        options give equal wrappers.

    Raises:
        TypeError: ``fn`` is not callable, or an option has the wrong type.
        ValueError: An option has an invalid value.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import keep_less
        >>> def loss(weights, x):
        ...     def layer(x, w):
        ...         return x + jax.nn.gelu(x @ w), None
        ...
        ...     return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)
        >>> weights, x = 0.1 * jnp.ones((3, 8, 8)), jnp.ones((2, 8))
        >>> plain, planned = (jax.grad(f)(weights, x) for f in (loss, keep_less(loss)))
        >>> bool(jnp.allclose(plain, planned, rtol=1e-6))
        True
    """
    options = KeepOptions(as_choice(residuals, keep_scopes), arguments.check_params(params))
    if fn is None:
        return functools.partial(_keeping, options=options)
    return _keeping(fn, options)


@dataclasses.dataclass(frozen=True)
class KeepOptions:
    """The checked options of a wrapper: how much is kept and where, and the parameters."""

    choice: ResidualChoice
    params: Any


def _keeping(fn: Any, options: KeepOptions) -> Any:
    if not isinstance(fn, Autocast):
        return wrapper_of(fn, options, KeepLess)
    if options.params is not None:
        raise ValueError(
            "keep_less got params= for a function that autocast has wrapped with its own. Write "
            "keep_less(autocast(fn, params=...))."
        )
    # Residuals are planned inside `autocast`, which knows the parameters and the state of objects.
    return fn.keeping(options.choice)


class KeepLess(Wrapper):
    """A function that keeps less for its backward pass: the result of `keep_less`."""

    _by = "keep_less"
    _fix = staticmethod(lambda value: "Pass options by keyword: @keep_less(residuals=...).")
    _options: KeepOptions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        choice = self._options.choice
        if choice.is_off:
            return self._fn(*args, **kwargs)
        call = arguments.flatten(self._fn, self._options.params, args, kwargs)
        # JAX's cache is not used: arrays that the function closes over may change between calls.
        closed = fresh_make_jaxpr(call.traceable, *call.arrays)
        call.look_at(closed)
        outputs = run_planned(closed, call.is_param, choice, call.arrays)
        avals = [v.aval for v in body_of(closed).outvars]
        return call.unflatten(
            [as_traced(x, a, "same") for x, a in zip(outputs, avals, strict=True)]
        )

    def __repr__(self) -> str:
        return f"keep_less({name_of(self._fn)}, residuals={self._options.choice.residuals!r})"
