"""`CompiledReport`: what a compiler made of a program, as plain data, a table and a page."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from ..export import counted, cut, labeled, scaled, table
from ..page.page import Page, Paged, section, tables_page
from ..report.totals import item_size
from .memory import CompiledMemory

_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """A matmul or convolution that runs.

    Args:
        kind: ``"dot"`` or ``"convolution"``, as the program has it: a TPU convolves for both.
        operands: The dtypes of its two operands, as it reads them.
        result: The dtype of its result.
        sums: The dtype in which it adds up; ``""`` where that is not known.
        kernel: The library or code generator that runs it: ``"cublas"``, ``"cudnn"``, ``"onednn"``,
            ``"ynn"``, ``"triton"``; ``""`` for the compiler's own code.
        precision: The precision or dot algorithm that the program asked for, ``""`` by default. On
            a TPU the default rounds float32 operands to bfloat16, on a GPU to TF32.
        flops: Floating point operations, over all ``times``; None where the text does not say.
        times: How often it runs in one run of the program.
        scope: The scopes around it, joined by ``/``.
        source: The source line, ``""`` where the text does not say.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> (product,) = explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).products
        >>> product.kind, product.operands, product.result, product.sums, product.times
        ('dot', ('float32', 'float32'), 'float32', 'float32', 1)
    """

    kind: str
    operands: tuple[str, str]
    result: str
    sums: str
    kernel: str
    precision: str
    flops: int | None
    times: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class CompiledCast:
    """A kernel that only casts: a pass over the memory for a dtype alone.

    Args:
        operand: The dtype that it reads.
        result: The dtype that it writes. Where both are the same, it rounds.
        nbytes: Bytes that it reads and writes, over all ``times``.
        times: How often it runs in one run of the program.
        scope: As of a `CompiledProduct`.
        source: As of a `CompiledProduct`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> (cast,) = explain_compiled(lambda x: x.astype(jnp.bfloat16), jnp.ones(100)).casts
        >>> cast.operand, cast.result, cast.nbytes
        ('float32', 'bfloat16', 600)
    """

    operand: str
    result: str
    nbytes: int
    times: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """An exchange between devices.

    Args:
        kind: Such as ``"all-gather"``.
        dtype: The dtype that goes over the wire.
        nbytes: The bytes that a device sends, over all ``times``, in a ring. None where the text
            does not say which devices exchange.
        times: How often it runs in one run of the program.
        scope: As of a `CompiledProduct`.
        source: As of a `CompiledProduct`.

    Example:
        >>> from jmp_autocast.inspect import CompiledCollective
        >>> gathered = CompiledCollective("all-gather", "bfloat16", 600, 1, "layer", "/model.py:12")
        >>> gathered.kind, gathered.nbytes
        ('all-gather', 600)
    """

    kind: str
    dtype: str
    nbytes: int | None
    times: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class CompiledCall:
    """A kernel whose inside the text does not show; it may multiply. Its FLOPs count nowhere.

    Args:
        target: What is called: ``"tpu_custom_call"`` of Mosaic, ``"__gpu$xla.gpu.triton"``.
        name: The name of the kernel, ``""`` where the text does not say.
        operands: The dtypes of its operands.
        results: The dtypes of its results.
        nbytes: Bytes that it reads and writes, over all ``times``.
        flops: What its author estimates, over all ``times``; None without an estimate.
        times: How often it runs in one run of the program.
        scope: As of a `CompiledProduct`.
        source: As of a `CompiledProduct`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> (call, *_) = explain_compiled(jnp.linalg.cholesky, jnp.eye(4)).calls
        >>> call.operands[0], call.flops is None
        ('float32', True)
    """

    target: str
    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    nbytes: int
    flops: int | None
    times: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class CompiledLoop:
    """A loop.

    Args:
        steps: How often its body runs each time; None where the text does not say: then what is
            inside counts once.
        times: How often it is entered in one run of the program.
        scope: As of a `CompiledProduct`.
        source: As of a `CompiledProduct`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> fn = lambda x: jax.lax.fori_loop(0, 7, lambda _, h: jnp.tanh(h @ h), x)
        >>> [loop.steps for loop in explain_compiled(fn, jnp.ones((8, 8))).loops]
        [7]
    """

    steps: int | None
    times: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Products or a collective that the compiler made in another way than they were planned.

    Args:
        kind: ``"wider"`` (planned in fewer bits than it runs in), ``"narrower"`` (in more),
            ``"sums"`` (planned to add up in float32, adds up in 16 bits), ``"repeated"`` (computed
            more often than planned), ``"wire"`` (a collective in more bits than planned).
        planned: The dtype that was planned; for what is repeated, the FLOPs.
        made: The dtype that it runs in; for what is repeated, the FLOPs.
        flops: The floating point operations that it is about; 0 for a collective.
        scope: The scopes around it, joined by ``/``.
        source: The source line.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import BF16, explain, explain_compiled
        >>> layer, x = lambda x: jnp.tanh(x @ x), jnp.ones((8, 8))
        >>> plan = explain(layer, x, policy=BF16)
        >>> (found,) = explain_compiled(jax.jit(layer).lower(x), plan=plan).deviations
        >>> found.kind, found.planned, found.made, found.flops
        ('wider', 'bfloat16', 'float32', 1024)
    """

    kind: str
    planned: str
    made: str
    flops: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class CompiledReport(Paged):
    """What `jmp_autocast.explain_compiled` returns.

    Args:
        name: The name of the compiled module.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; ``""`` where the text does not show it.
        products: The matmuls and convolutions, those inside fusions too, in program order.
        casts: The kernels that only cast.
        collectives: The exchanges between devices.
        calls: The kernels whose inside the text does not show.
        loops: The loops.
        memory: The bytes that the program holds; None where they are not known: a text alone does
            not say.
        nbytes: Bytes that kernels read from and write to the large memory in one run.
        flops: All floating point operations of one run: what XLA's cost analysis counts, with loops
            multiplied, and the products of libraries. Those of ``calls`` are not among them.
        kernels: How many kernels run.
        lines: The instructions of the text.
        unread: The lines of the text that are not understood, and the names of kernels whose bytes
            are not known. None of them counts as anything else.
        deviations: What differs from the plan; None without a plan.
        unmatched_flops: The planned FLOPs of products at source lines of which the compiled program
            has no product: of these no deviation can be known. None without a plan.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> report = explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16)))
        >>> [(p.kind, p.operands, p.flops) for p in report.products]
        [('dot', ('float32', 'float32'), 1024)]
    """

    _computed: ClassVar[tuple[str, ...]] = (
        "summary",
        "product_flops",
        "unknown_products",
        "unread_share",
        "opaque_share",
    )

    name: str
    platform: str
    products: tuple[CompiledProduct, ...]
    casts: tuple[CompiledCast, ...]
    collectives: tuple[CompiledCollective, ...]
    calls: tuple[CompiledCall, ...]
    loops: tuple[CompiledLoop, ...]
    memory: CompiledMemory | None
    nbytes: int
    flops: int
    kernels: int
    lines: int
    unread: tuple[str, ...]
    deviations: tuple[Deviation, ...] | None = None
    unmatched_flops: int | None = None

    @property
    def product_flops(self) -> int:
        """The FLOPs of matmuls and convolutions, loops multiplied.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).product_flops
            1024
        """
        return sum(product.flops or 0 for product in self.products)

    @property
    def unknown_products(self) -> int:
        """The number of products whose FLOPs the text does not say.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.sin, jnp.ones(4)).unknown_products
            0
        """
        return sum(product.flops is None for product in self.products)

    @property
    def unread_share(self) -> float:
        """The share of the text's instructions that are not understood, from 0 to 1.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.sin, jnp.ones(4)).unread_share
            0.0
        """
        return len(self.unread) / max(self.lines, 1)

    @property
    def opaque_share(self) -> float:
        """The share of the moved bytes that kernels move whose inside the text does not show.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.sin, jnp.ones(4)).opaque_share
            0.0
        """
        return sum(call.nbytes for call in self.calls) / max(self.nbytes, 1)

    def by_dtype(self) -> dict[str, int]:
        """Returns the FLOPs of products by the wider dtype of their operands, the most first.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).by_dtype()
            {'float32': 1024}
        """
        counts: collections.Counter[str] = collections.Counter()
        for product in self.products:
            counts[wider(product.operands)] += product.flops or 0
        return dict(counts.most_common())

    def share(self, dtype: str) -> float:
        """Returns the share of the FLOPs of products whose operands have a dtype, from 0 to 1.

        Args:
            dtype: Its name: ``"bfloat16"``.

        Returns:
            0 for a program without products.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).share("float32")
            1.0
        """
        return self.by_dtype().get(dtype, 0) / max(self.product_flops, 1)

    @property
    def summary(self) -> str:
        """The report in one line.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).summary
            'jit_matmul on cpu: products 100.0 % in float32; 1 kernel, 0 only cast'
        """
        shares = [f"{100 * self.share(name):.1f} % in {name}" for name in self.by_dtype()]
        found = f"products {', '.join(shares)}" if self.products else "no products"
        casts = sum(cast.times for cast in self.casts)
        where = f" on {self.platform}" if self.platform else ""
        kernels = counted(self.kernels, "kernel")
        return cut(f"{self.name}{where}: {found}; {kernels}, {casts:,} only cast")

    def __str__(self) -> str:
        """Returns the summary, the totals, and a table of each kind of row that there is."""
        lines = [self.summary, "", *self._facts()]
        for each in self._tables():
            if each.rows:
                lines += ["", *each.lines()]
        return "\n".join(lines)

    def _facts(self) -> list[str]:
        memory, wire = self.memory, sum(each.nbytes or 0 for each in self.collectives)
        unknown = [loop for loop in self.loops if loop.steps is None]
        return labeled(
            {
                "FLOPs": f"{scaled(self.flops)}, of them {scaled(self.product_flops)} in products",
                "not known": f"the FLOPs of {counted(self.unknown_products, 'product')}"
                if self.unknown_products
                else None,
                "moved": f"{scaled(self.nbytes)}B read and written by kernels",
                "wire": f"{scaled(wire)}B sent by each device" if self.collectives else None,
                "memory": f"{scaled(memory.temporary)}B temporary, {scaled(memory.arguments)}B of "
                "arguments"
                if memory
                else "unknown: the text does not say",
                "loops": f"{counted(len(unknown), 'loop')} of unknown length, counted once"
                if unknown
                else None,
                "kernels": f"{100 * self.opaque_share:.1f} % of the moved bytes in kernels whose "
                "inside is not shown"
                if self.calls
                else None,
                "unread": f"{counted(len(self.unread), 'line')} of {self.lines} not understood "
                f"({100 * self.unread_share:.1f} %), such as {self.unread[0]}"
                if self.unread
                else None,
                "plan": self._plan(),
            }
        )

    def _plan(self) -> str | None:
        if self.deviations is None:
            return None
        found = counted(len(self.deviations), "deviation") if self.deviations else "as planned"
        if self.unmatched_flops:
            found += f"; {scaled(self.unmatched_flops)}FLOPs of the plan are at lines without one"
        return found

    def _tables(self) -> list[_Table]:
        return [
            _Table(
                "Not as planned",
                {"kind": "9", "planned": "10", "made": "10", "FLOPs": ">7"},
                self.deviations or (),
                lambda row: (row.kind, row.planned, row.made, row.flops),
            ),
            _Table(
                "Products",
                {"times": ">5", "FLOPs": ">7", "dtypes": "32", "kernel": "8"},
                _grouped(self.products, lambda row: row.flops or 0),
                lambda row: (row.times, row.flops, dtypes_of(row), row.kernel or "-"),
            ),
            _Table(
                "Kernels that only cast",
                {"times": ">5", "bytes": ">7", "dtypes": "24"},
                _grouped(self.casts, lambda row: row.nbytes),
                lambda row: (row.times, row.nbytes, f"{row.operand} -> {row.result}"),
            ),
            _Table(
                "Collectives",
                {"times": ">5", "sent": ">7", "kind": "28"},
                _grouped(self.collectives, lambda row: row.nbytes or 0),
                lambda row: (row.times, row.nbytes, f"{row.kind} {row.dtype}"),
            ),
            _Table(
                "Kernels whose inside is not shown",
                {"times": ">5", "bytes": ">7", "call": "26", "dtypes": "26"},
                _grouped(self.calls, lambda row: row.nbytes),
                lambda row: (row.times, row.nbytes, row.name or row.target, call_dtypes_of(row)),
            ),
            _Table(
                "Loops",
                {"times": ">5", "steps": ">7"},
                self.loops,
                lambda row: (row.times, row.steps),
            ),
        ]

    def _page(self) -> Page:
        """Returns the page: a table of each kind of row."""
        sections = [
            section(each.title, ", ".join([*each.columns, *_WHERE]), each.page_rows())
            for each in self._tables()
        ]
        return tables_page("Compiled program", self.name, self.summary, sections)


_WHERE = {"scope": "22", "source": ""}


class _Table(NamedTuple):
    """A table of rows, for a page and, with short numbers and file names, for a text."""

    title: str
    columns: dict[str, str]
    rows: Sequence[Any]
    cells: Callable[[Any], tuple[Any, ...]]

    def page_rows(self) -> list[tuple[Any, ...]]:
        """Returns the cells of all rows; ``"?"`` for what is not known."""
        return [
            (*("?" if x is None else x for x in self.cells(row)), row.scope, row.source)
            for row in self.rows
        ]

    def lines(self) -> list[str]:
        """Returns the title and the lines of the table."""
        scales = [title in ("FLOPs", "bytes", "sent") for title in self.columns]

        def short(cells: tuple[Any, ...]) -> list[Any]:
            numbers = zip(cells, scales, strict=False)  # the place has no scale
            texts = [scaled(x) if scale and x != "?" else x for x, scale in numbers]
            *_, scope, source = cells
            return [*texts, scope, source.rpartition("/")[2]]

        columns = {**self.columns, **_WHERE}
        return [self.title, *table(columns, self.page_rows(), short, _SHOWN, "more rows")]


def dtypes_of(product: CompiledProduct) -> str:
    """Returns the dtypes of a product in a few words: what it reads, writes and adds up in."""
    text = f"{' x '.join(dict.fromkeys(product.operands))} -> {product.result}"
    text = f"conv {text}" if product.kind == "convolution" else text
    return f"{text} (sums too)" if product.sums in ("bfloat16", "float16") else text


def call_dtypes_of(call: CompiledCall) -> str:
    """Returns the dtypes of a kernel's operands and results in a few words."""
    ends = (", ".join(dict.fromkeys(names)) for names in (call.operands, call.results))
    return " -> ".join(ends)


def wider(names: Sequence[str]) -> str:
    """Returns the dtype with the most bits of two, in which a product of both computes."""
    return max(names, key=item_size)


def _grouped(rows: Sequence[Any], size: Any) -> list[Any]:
    """Returns rows with those that differ in numbers alone as one, the largest first."""
    groups: dict[Any, list[Any]] = collections.defaultdict(list)
    numbers = [name for name in ("flops", "nbytes", "times") if rows and hasattr(rows[0], name)]
    for row in rows:
        groups[dataclasses.replace(row, **dict.fromkeys(numbers))].append(row)
    merged = [
        dataclasses.replace(key, **{x: _added([getattr(row, x) for row in group]) for x in numbers})
        for key, group in groups.items()
    ]
    return sorted(merged, key=lambda row: -size(row))


def _added(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
