"""`CompiledReport`: the products and kernels of an executable as plain data and as text."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..export import Exported, counted, cut, scaled, table
from ..report.totals import item_size

_PLURAL = {"product": "products", "cast": "casts", "copy": "copies", "other": "others"}

_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """A matmul or convolution of a compiled program.

    Args:
        kind: ``"dot"`` or ``"convolution"``, as in the user's program, although the TPU compiler
            writes both as convolutions.
        operands: The dtypes of its two operands, as the kernel loads them.
        result: The dtype of its result.
        sums: The dtype of the accumulator; ``""`` if it is unknown.
        kernel: The library or code generator that runs it: ``"cublas"``, ``"cudnn"``, ``"onednn"``,
            ``"ynn"``, ``"triton"``; ``""`` for the compiler's own code.
        precision: The precision or dot algorithm that the program requests, ``""`` by default. On a
            TPU the default rounds float32 operands to bfloat16, on a GPU to TF32.
        flops: Floating point operations, over all ``times``; None if the text lacks the dimensions.
        times: How often it runs in one run of the program.
        scope: The enclosing scopes, joined by ``/``.
        source: The source line, ``""`` if the text lacks it.

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
class CompiledKernel:
    """A kernel of a compiled program.

    Args:
        name: Its name in the text of the module and in profiles.
        kind: ``"product"`` if it holds a matmul or convolution; ``"cast"`` if it only casts,
            ``"copy"`` if it only moves data; else ``"other"``, also for asynchronous copies.
        operand: The dtype that a cast or copy loads; ``""`` for other kinds.
        result: The dtype of the first result.
        nbytes: The bytes that a cast or copy loads from and stores to main memory, over all
            ``times``; arrays in the on-chip memory of a TPU do not count. None for other kinds.
        cycles: The cycles that the TPU compiler estimates, over all ``times``; None without an
            estimate, as for asynchronous copies and on other devices.
        times: How often it runs in one run of the program.
        scope: The enclosing scopes, joined by ``/``.
        source: The source line, ``""`` if the text lacks it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> (cast,) = explain_compiled(lambda x: x.astype(jnp.bfloat16), jnp.ones(100)).kernels
        >>> cast.kind, cast.operand, cast.result, cast.nbytes
        ('cast', 'float32', 'bfloat16', 600)
    """

    name: str
    kind: str
    operand: str
    result: str
    nbytes: int | None
    cycles: int | None
    times: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class CompiledReport(Exported):
    """The result of `jmp_autocast.explain_compiled`. All numbers include each iteration of loops.

    Args:
        name: The name of the module.
        platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``""`` if it is unknown.
        products: The matmuls and convolutions, including those inside fusions, in program order.
        kernels: The kernels, in program order.
        collectives: How often each collective runs, by name and dtype: ``"all-gather bfloat16"``.
        calls: The targets of custom calls whose operations the text does not show, in text order.
            If they run matmuls, the FLOPs are not counted.
        loops_of_unknown_length: The number of loops of unknown length: their bodies count once.
        temporary: The bytes of XLA's temporary buffers; None if the program was given as text.
        unread: The lines of the text that could not be parsed; no other number includes them.
        against: The report of the program in ``against=``, None without one.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmp_autocast import explain_compiled
        >>> report = explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16)))
        >>> [(p.kind, p.operands, p.flops) for p in report.products]
        [('dot', ('float32', 'float32'), 1024)]
    """

    _computed: ClassVar[tuple[str, ...]] = ("summary", "cycles", "product_flops")

    name: str
    platform: str
    products: tuple[CompiledProduct, ...]
    kernels: tuple[CompiledKernel, ...]
    collectives: Mapping[str, int]
    calls: tuple[str, ...]
    loops_of_unknown_length: int
    temporary: int | None
    unread: tuple[str, ...]
    against: CompiledReport | None = None

    @property
    def cycles(self) -> int | None:
        """The cycles that the TPU compiler estimates; None on other devices.

        Asynchronous copies have no estimate.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.sin, jnp.ones(4)).cycles is None  # no TPU
            True
        """
        return _total(kernel.cycles for kernel in self.kernels)

    def cycles_by_kind(self) -> dict[str, int]:
        """Returns the estimated cycles of each kind of kernel.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.sin, jnp.ones(4)).cycles_by_kind()  # no TPU
            {'product': 0, 'cast': 0, 'copy': 0, 'other': 0}
        """
        scopes = self.cycles_by_scope().values()
        return {kind: sum(scope[kind] for scope in scopes) for kind in _PLURAL}

    def cycles_by_scope(self) -> dict[str, dict[str, int]]:
        """Returns the estimated cycles of each scope by kind, excluding the scopes inside it.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.sin, jnp.ones(4)).cycles_by_scope()  # no TPU
            {}
        """
        found: dict[str, dict[str, int]] = {}
        for kernel in self.kernels:
            if kernel.cycles is not None:
                by_kind = found.setdefault(kernel.scope, dict.fromkeys(_PLURAL, 0))
                by_kind[kernel.kind] += kernel.cycles
        return found

    @property
    def product_flops(self) -> int:
        """The sum of the FLOPs of matmuls and convolutions, as far as they are known.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).product_flops
            1024
        """
        return sum(product.flops or 0 for product in self.products)

    def by_dtype(self) -> dict[str, int]:
        """Returns the FLOPs of products by the wider of their operand dtypes, largest first.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).by_dtype()
            {'float32': 1024}
        """
        counts: collections.Counter[str] = collections.Counter()
        for product in self.products:
            counts[max(product.operands, key=item_size)] += product.flops or 0
        return dict(counts.most_common())

    def share(self, dtype: str) -> float:
        """Returns the share of a dtype in the FLOPs of products, from 0 to 1; 0 without products.

        Args:
            dtype: The name of the wider operand dtype: ``"bfloat16"``.

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
            'jit_matmul on cpu: products 100.0 % in float32; 1 kernel, 0 only cast, 0 only copy'
        """
        shares = [f"{100 * self.share(name):.1f} % in {name}" for name in self.by_dtype()]
        found = f"products {', '.join(shares)}" if self.products else "no products"
        where = f" on {self.platform}" if self.platform else ""
        kernels = counted(sum(kernel.times for kernel in self.kernels), "kernel")
        casts, copies = (sum(k.times for k in self._of(kind)) for kind in ("cast", "copy"))
        return cut(
            f"{self.name}{where}: {found}; {kernels}, {casts:,} only cast, {copies:,} only copy"
        )

    def __str__(self) -> str:
        """Returns the summary, totals, cycles by scope, and tables of products, casts and copies.

        Totals and cycles have a column for the program in ``against=``.
        """
        other, lines = self.against, [self.summary]
        if other is not None:
            lines.append(cut(f"against {other.summary}"))
        totals = self._totals(), None if other is None else other._totals()
        lines += ["", *_beside(*totals, ("",), "total", 9)]
        lines += ["", *notes] if (notes := list(self._notes())) else []
        if self.cycles is not None:
            scopes = self._layers(), None if other is None else other._layers()
            lines += ["", *_beside(*scopes, ("cycles", *_PLURAL.values()), "scope", 8)]
        return "\n".join([*lines, *self._tables()])

    def _totals(self) -> dict[str, tuple[int | None]]:
        by_kind = {} if self.cycles is None else self.cycles_by_kind()
        moved = {kind: _total(k.nbytes for k in self._of(kind)) for kind in ("cast", "copy")}
        totals = {
            "cycles (estimate)": self.cycles,
            **{f"  of {_PLURAL[kind]}": found for kind, found in by_kind.items()},
            "FLOPs of products": self.product_flops,
            **{f"  in {dtype}": flops for dtype, flops in self.by_dtype().items()},
            "bytes of casts": moved["cast"],
            "bytes of copies": moved["copy"],
            "temporary bytes": self.temporary,
            "kernels": sum(kernel.times for kernel in self.kernels),
            **self.collectives,
        }
        return {name: (total,) for name, total in totals.items()}

    def _layers(self) -> dict[str, tuple[int, ...]]:
        """Returns the cycles of each scope, in total and by kind; numbers in names become ``*``."""
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for scope, cycles in self.cycles_by_scope().items():
            counts[_without_numbers(scope) or "(no scope)"].update(cycles)
        ordered = sorted(counts.items(), key=lambda item: -item[1].total())
        return {scope: (own.total(), *(own[kind] for kind in _PLURAL)) for scope, own in ordered}

    def _notes(self) -> Iterator[str]:
        if self.cycles is not None:
            yield "Cycles are the compiler's estimate, without asynchronous copies."
        if loops := self.loops_of_unknown_length:
            yield f"{counted(loops, 'loop')} of unknown length, counted once."
        if unknown := sum(product.flops is None for product in self.products):
            yield f"The FLOPs of {counted(unknown, 'product')} are not known."
        if self.calls:
            names = ", ".join(dict.fromkeys(self.calls))
            yield cut(f"{counted(len(self.calls), 'opaque kernel')}: {names}")
        if self.unread:
            yield cut(f"{counted(len(self.unread), 'line')} not understood: {self.unread[0]}")

    def _tables(self) -> Iterator[str]:
        products = [
            ((dtypes_of(p), p.kernel or "-", p.scope, p.source), (p.times, p.flops))
            for p in self.products
        ]
        columns = {"times": ">5", "FLOPs": ">7", "dtypes": "32", "kernel": "8"}
        yield from _table("Products", columns, products)
        moves = [
            ((f"{x.kind} {x.operand} -> {x.result}", x.scope, x.source), numbers)
            for x in self._of("cast") + self._of("copy")
            for numbers in [(x.times, x.nbytes, x.cycles)]
        ]
        columns = {"times": ">5", "bytes": ">7", "cycles": ">7", "dtypes": "28"}
        yield from _table("Kernels that only cast or copy", columns, moves)

    def _of(self, kind: str) -> list[CompiledKernel]:
        return [kernel for kernel in self.kernels if kernel.kind == kind]


def dtypes_of(product: CompiledProduct) -> str:
    """Returns the dtypes of a product as a short text, with the accumulator if it has 16 bits."""
    text = f"{' x '.join(dict.fromkeys(product.operands))} -> {product.result}"
    text = f"conv {text}" if product.kind == "convolution" else text
    return f"{text} (sums too)" if product.sums in ("bfloat16", "float16") else text


def _without_numbers(scope: str) -> str:
    return re.sub(r"\d+", "*", scope)


def _total(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _number(value: int | None) -> str:
    return "-" if value is None else scaled(value)


def _beside(
    own: Mapping[str, tuple[int | None, ...]],
    other: Mapping[str, tuple[int | None, ...]] | None,
    titles: Sequence[str],
    name_title: str,
    width: int,
) -> list[str]:
    """Returns a table with a row of numbers for each name.

    ``own`` maps names to numbers. If ``other`` is given, each row ends with two more numbers: the
    first number of ``other`` for the same name, and the ratio of the first number of ``own`` to it.
    """
    none = (None,) * len(titles)
    columns = dict.fromkeys(titles, f">{width}")
    if other is not None:
        columns |= {"against": f">{width}", "ratio": f">{width - 3}"}

    def cells(name: str) -> list[str]:
        numbers = own.get(name, none)
        if other is None:
            return [*map(_number, numbers), name]
        mine, theirs = numbers[0], other.get(name, none)[0]
        ratio = f"{mine / theirs:.2f}" if mine and theirs else "-"
        return [*map(_number, (*numbers, theirs)), ratio, name]

    found = {**own, **(other or {})}
    names = [name for name in found if {*own.get(name, none), *found[name]} != {None}]
    return table({**columns, name_title: ""}, names, cells, _SHOWN, "more")


def _table(
    title: str,
    columns: dict[str, str],
    rows: Sequence[tuple[tuple[str, ...], tuple[int | None, ...]]],
) -> Iterator[str]:
    """Yields the lines of a table, the largest row first; rows with equal text are merged."""
    groups: dict[tuple[str, ...], list[tuple[int | None, ...]]] = collections.defaultdict(list)
    for (*words, scope, source), numbers in rows:
        groups[*words, _without_numbers(scope), source.rpartition("/")[2]].append(numbers)
    merged = [
        (words, [_total(column) for column in zip(*found, strict=True)])
        for words, found in groups.items()
    ]

    def cells(row: tuple[tuple[str, ...], list[int | None]]) -> list[Any]:
        words, (times, *numbers) = row
        return [times, *map(_number, numbers), *words]

    if merged:
        merged.sort(key=lambda row: -(row[1][1] or 0))
        columns = {**columns, "scope": "22", "source": ""}
        yield from ("", title, *table(columns, merged, cells, _SHOWN, "more rows"))
