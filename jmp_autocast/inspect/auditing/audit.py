"""`audit`: what is risky in a program that its author wrote in 16 bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from ...autocast import kind_of
from ...call.arguments import check_function, name_of
from ...call.options import autocast_options
from ...call.wrapping import wrapper_of
from ...interpreters.plan.float_dtypes import float_dtype
from ...interpreters.primitives.structure import equations_in
from ...policies import FLOAT32, narrow_dtypes
from ...policies.choices import check_choice
from ...policies.errors import with_usage
from ...policies.tables import TRACED_FOR_DTYPES
from ..export import Exported, counted, cut, labeled, table
from ..measure.measured import user_names
from .kinds import KINDS, estimate, unit_roundoff
from .risks import Program, Risk


@with_usage("audit(fn, *args)")
def audit(
    fn: Callable[..., Any], *args: Any, ignore: Sequence[str] = (), **kwargs: Any
) -> AuditReport:
    """Lists the risky operations of a program whose author wrote 16 bits by hand.

    These are sums of more than 16 terms, exponentials and logarithms, powers and norms, positions
    and their angles, masks beyond the range, the choice of experts, loops that add up, what a
    reader needs digits of (the planner's table of needs), updates of weights, and the loss. It does
    not list operations that 16 bits are good for: products, which add up in float32, activations,
    biases, and operations whose operands are cast to float32 first.
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


_SHOWN = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One source line that is risky in 16 bits.

    Args:
        kind: What kind of risk it is: a key of `KINDS`.
        dtype: The 16-bit dtype.
        source: The user's source line.
        scope: The scopes around the first place, joined by ``/``.
        primitive: The primitive's name.
        places: How many equations come from the line.
        shape: The shape of the first result.
        n: The largest number of terms, steps or positions; None where it says nothing.
        typical: The error to expect, None where it depends on values alone.
        worst: The largest error; infinity where there is no bound, None as above.
        says: What goes wrong.
        formula: What the errors are relative to, and how they are estimated.
        fix: What to write instead.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast.inspect import audit
        >>> (finding,) = audit(jnp.exp, jnp.ones(4, jnp.bfloat16)).findings
        >>> finding.kind, finding.primitive, finding.typical
        ('exponential', 'exp', 0.0078125)
    """

    kind: str
    dtype: str
    source: str
    scope: str
    primitive: str
    places: int
    shape: tuple[int, ...]
    n: float | None
    typical: float | None
    worst: float | None
    says: str
    formula: str
    fix: str


@dataclasses.dataclass(frozen=True)
class AuditReport(Exported):
    """What `jmp_autocast.inspect.audit` returns.

    Args:
        name: The function's name.
        dtypes: The 16-bit dtypes that the program declares.
        findings: What is risky, by kind, the largest error of a kind first.
        opaque: Names of primitives that read 16 bits, and whose inside is not looked at.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast.inspect import audit
        >>> def careful(x):
        ...     return jnp.sum(x, dtype=jnp.float32)
        >>> audit(careful, jnp.ones(64, jnp.bfloat16)).is_clean
        True
    """

    _computed: ClassVar[tuple[str, ...]] = ("is_clean",)

    name: str
    dtypes: tuple[str, ...]
    findings: tuple[Finding, ...]
    opaque: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.inspect import audit
            >>> audit(jnp.log, jnp.ones(64, jnp.bfloat16)).is_clean
            False
        """
        return not self.findings

    @property
    def summary(self) -> str:
        """The report in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast.inspect import audit
            >>> audit(jnp.tanh, jnp.ones(64, jnp.bfloat16)).summary
            'tanh: nothing risky in bfloat16'
        """
        if not self.dtypes:
            return cut(f"{self.name}: nothing is declared in 16 bits")
        found = counted(len(self.findings), "risky line") if self.findings else "nothing risky"
        return cut(f"{self.name}: {found} in {' and '.join(self.dtypes)}")

    def __str__(self) -> str:
        """Returns the summary, and for each kind of risk what to write, a table, and the lines."""
        opaque = ", ".join(self.opaque)
        lines = labeled({"not seen": f"the inside of {opaque}" if opaque else None})
        for _, found in itertools.groupby(self.findings, key=lambda x: (x.kind, x.says)):
            lines += ["", *_section(list(found))]
        if self.findings:
            roundoffs = [f"u = {unit_roundoff(d):.2g} in {d}" for d in self.dtypes]
            lines += ["", ", ".join(roundoffs)]
        return "\n".join([self.summary, *lines])


def _section(findings: Sequence[Finding]) -> list[str]:
    """Returns what a kind of risk is, what to write instead, and where it is."""
    first = findings[0]
    facts = labeled({"error": first.formula, "instead": first.fix})
    columns = {"typical": ">10", "worst": ">8", "n": ">9", "places": ">6"}
    columns |= {"primitive": "20", "scope": ""}
    rows = table(columns, findings, _cells, _SHOWN)
    # Whole paths: a terminal makes links of them, and so does the log of a CI.
    places = [f"  at {finding.source}" for finding in findings[:_SHOWN]]
    return [f"{first.kind}: {first.says}", *(cut(f"  {x}") for x in facts), *rows, *places]


def _cells(finding: Finding) -> list[Any]:
    errors = ["" if x is None else f"{x:.2g}" for x in (finding.typical, finding.worst)]
    n = "" if finding.n is None else f"{finding.n:g}"
    return [*errors, n, finding.places, finding.primitive, finding.scope]


def findings_of(risks: Iterable[Risk], dtype: Any) -> list[Finding]:
    """Returns a finding for each source line and kind, in the order of `KINDS`.

    Args:
        risks: The risks of a program.
        dtype: The 16-bit dtype that was looked for.
    """
    groups: dict[tuple[str, str, str, str], list[Risk]] = {}
    for risk in risks:
        eqn = risk.visit.eqn
        line = risk.kind, risk.why, risk.source, eqn.primitive.name
        groups.setdefault(line, []).append(risk)
    found = []
    for (kind, why, source, primitive), places in groups.items():
        n = max((risk.n for risk in places if risk.n is not None), default=None)
        first = places[0].visit
        scope = "/".join(user_names(first.scope))
        shape = tuple(getattr(first.eqn.outvars[0].aval, "shape", ()))
        where = (source, scope, primitive, len(places), shape)
        said = KINDS[kind]
        if why:
            said = said._replace(says=f"{said.says}: {why}")
        found.append(Finding(kind, str(dtype), *where, n, *estimate(kind, dtype, n), *said))
    order = list(KINDS)
    return sorted(found, key=lambda x: (order.index(x.kind), x.says, -(x.worst or 0), -(x.n or 0)))
