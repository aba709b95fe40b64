"""`audit`: what is risky in a program that its author wrote in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...autocast import kind_of
from ...call.arguments import check_function, name_of
from ...call.options import autocast_options
from ...call.wrapping import wrapper_of
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.primitives.structure import equations_in
from ...policies import FLOAT32, narrow_dtypes
from ...policies.choices import check_choice
from ...policies.tables import TRACED_FOR_DTYPES
from .findings import AuditReport, findings_of
from .kinds import KINDS
from .risks import Program


def audit(
    fn: Callable[..., Any], *args: Any, ignore: Sequence[str] = (), **kwargs: Any
) -> AuditReport:
    """Lists the risky operations of a program whose author wrote 16 bits by hand.

    These are sums of more than 16 terms, exponentials and logarithms, powers and norms, positions
    and their angles, masks beyond the range, the choice of experts, loops that add up, updates of
    weights, and the loss. It does not list operations that 16 bits are good for: products, which
    add up in float32, activations, biases, and operations whose operands are cast to float32 first.
    It computes nothing and accepts ``jax.ShapeDtypeStruct`` in place of any array.

    `audit` and `autocast` agree on what loses too much in 16 bits: the policy says so. Regions that
    `autocast`, `full_precision` or `compute_precision` governs have a precision that somebody
    chose, and are left out. To look at the backward pass, audit the gradient.

    Args:
        fn: The function, with its arguments in the dtypes that it runs with.
        *args: Its positional arguments, as arrays or ``jax.ShapeDtypeStruct``.
        ignore: Kinds of risk that are not listed, such as ``("loss",)``.
        **kwargs: Its keyword arguments.

    Returns:
        The report, for ``print(report)``, ``report.findings`` and ``assert report.is_clean``.

    Raises:
        TypeError: ``fn`` is not callable, or ``ignore`` is a string.
        ValueError: There is no such kind.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast.inspect import audit
        >>> def attention(q, k):
        ...     return jax.nn.softmax(q @ k.T)
        >>> q = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
        >>> [(x.kind, x.primitive) for x in audit(attention, q, q).findings]
        [('exponential', 'exp')]
        >>> def careful(q, k):
        ...     return jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(q.dtype)
        >>> audit(careful, q, q).findings
        ()
    """
    check_function(fn, "audit", "Pass the function itself, then its arguments.")
    if isinstance(ignore, str):
        raise TypeError(f"ignore takes several kinds, got {ignore!r}. Write ignore=({ignore!r},).")
    for kind in ignore:
        check_choice("each kind in ignore", kind, tuple(KINDS))
    found, dtypes, opaque = [], [], {}
    for dtype in narrow_dtypes(FLOAT32):
        # The policy of a dtype leaves the other one alone: a program in both is planned for each.
        wrapper = wrapper_of(fn, autocast_options(dtype), kind_of(fn, args, kwargs))
        planned = wrapper.planned(*args, **kwargs)
        readers = [
            eqn.primitive.name
            for eqn, _ in equations_in(planned.closed)
            if any(float_dtype(v.aval, FLOAT32) == dtype for v in (*eqn.invars, *eqn.outvars))
        ]
        if readers:
            dtypes.append(str(dtype))
            opaque.update(dict.fromkeys(name for name in readers if name in TRACED_FOR_DTYPES))
            risks = Program(planned, dtype).risks()
            found += findings_of([risk for risk in risks if risk.kind not in ignore], dtype)
    return AuditReport(name_of(fn), tuple(dtypes), tuple(found), tuple(opaque))
