"""`CompiledReport`: what a compiler made of a program, as plain data and a page of text."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..export import Exported, counted, cut, scaled, table
from ..report.totals import item_size

KINDS: tuple[str, ...] = ("product", "cast", "copy", "other")
"""The kinds of kernels."""

_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """A matmul or convolution that runs.

    Args:
        kind: ``"dot"`` or ``"convolution"``, as the program has it: a TPU convolves for both.
        operands: The dtypes of its two operands, as the kernel loads them.
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
class CompiledKernel:
    """A kernel that runs.

    Args:
        name: Its name in the text of the module, as profiles have it.
        kind: ``"product"`` if it multiplies matrices or convolves, whatever else it does;
            ``"cast"`` if it does nothing but cast, ``"copy"`` if it does nothing but move;
            ``"other"``, also for asynchronous copies.
        operand: The dtype that a cast or copy loads; ``""`` for others.
        result: The dtype that it stores, of several results the first.
        nbytes: The bytes that a cast or copy moves from and to the large memory, over all
            ``times``: none from and to the memory on a chip. None for others.
        cycles: The cycles that the TPU compiler estimates, over all ``times``; None without an
            estimate, as for asynchronous copies and on other devices.
        times: How often it runs in one run of the program.
        scope: As of a `CompiledProduct`.
        source: As of a `CompiledProduct`.

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
    """What `jmp_autocast.explain_compiled` returns. All numbers have loops multiplied.

    Args:
        name: The name of the module.
        platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``""`` if it is not known.
        products: The matmuls and convolutions, those inside fusions too, in program order.
        kernels: The kernels, in program order.
        collectives: How often each exchange between devices runs, by kind and dtype:
            ``"all-gather bfloat16"``.
        calls: The custom calls whose inside the text does not show, each as often as it stands in
            the text. They may multiply; their FLOPs count nowhere.
        loops_of_unknown_length: The number of loops whose body counts once.
        temporary: The bytes of the compiler's own buffers; None where a text alone is read.
        unread: The lines of the text that are not understood. None of them counts as anything else.
        against: The program that it is shown beside, None without one.

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
        """The cycles that the TPU compiler estimates; None for any other device.

        They are the compiler's estimate, and leave out asynchronous copies.

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
        return {kind: _total(k.cycles for k in self._of(kind)) or 0 for kind in KINDS}

    def cycles_by_scope(self) -> dict[str, dict[str, int]]:
        """Returns the estimated cycles in each scope by kind, without the scopes inside it.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.sin, jnp.ones(4)).cycles_by_scope()  # no TPU
            {}
        """
        found: dict[str, dict[str, int]] = {}
        for kernel in self.kernels:
            if kernel.cycles is not None:
                by_kind = found.setdefault(kernel.scope, dict.fromkeys(KINDS, 0))
                by_kind[kernel.kind] += kernel.cycles
        return found

    @property
    def product_flops(self) -> int:
        """The FLOPs of matmuls and convolutions, as far as the text says them.

        Example:
            >>> import jax.numpy as jnp
            >>> from jmp_autocast import explain_compiled
            >>> explain_compiled(jnp.matmul, jnp.ones((8, 4)), jnp.ones((4, 16))).product_flops
            1024
        """
        return sum(product.flops or 0 for product in self.products)

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
            counts[max(product.operands, key=item_size)] += product.flops or 0
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

        Totals and cycles stand beside those of the other program, if there is one.
        """
        other, lines = self.against, [self.summary]
        if other is not None:
            lines.append(cut(f"against {other.summary}"))
        lines += ["", *_totals_table(self._totals(), other and other._totals())]
        lines += ["", *notes] if (notes := list(self._notes())) else []
        return "\n".join([*lines, *self._scopes(), *self._tables()])

    def _totals(self) -> dict[str, int | None]:
        by_kind = {} if self.cycles is None else self.cycles_by_kind()
        moved = {kind: _total(k.nbytes for k in self._of(kind)) for kind in ("cast", "copy")}
        return {
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

    def _scopes(self) -> Iterator[str]:
        """Yields the table of cycles by scope and kind; layers that differ in numbers are one."""
        own, other = self._by_layers(), self.against and self.against._by_layers()
        columns = dict.fromkeys(("cycles", *_PLURAL.values()), ">8")
        columns |= {"against": ">8", "ratio": ">5"} if other else {}

        def cells(scope: str) -> list[str]:
            numbers = [own[scope].total(), *(own[scope][kind] for kind in KINDS)]
            beside = [other[scope].total()] if other else []
            ratios = [_ratio(numbers[0], *beside)] if other else []
            return [*map(_number, (*numbers, *beside)), *ratios, scope or "(no scope)"]

        if self.cycles is not None:
            scopes = sorted({**own, **(other or {})}, key=lambda scope: -own[scope].total())
            columns |= {"scope": ""}
            yield from ("", *table(columns, scopes, cells, _SHOWN, "more scopes"))

    def _by_layers(self) -> Mapping[str, collections.Counter[str]]:
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for scope, cycles in self.cycles_by_scope().items():
            counts[_layers(scope)].update(cycles)
        return counts

    def _notes(self) -> Iterator[str]:
        if self.cycles is not None:
            yield "Cycles are the compiler's estimate, which leaves out asynchronous copies."
        if loops := self.loops_of_unknown_length:
            yield f"{counted(loops, 'loop')} of unknown length, counted once."
        if unknown := sum(product.flops is None for product in self.products):
            yield f"The FLOPs of {counted(unknown, 'product')} are not known."
        if self.calls:
            names = ", ".join(dict.fromkeys(self.calls))
            yield cut(f"{counted(len(self.calls), 'kernel')} of others, not looked into: {names}")
        if self.unread:
            yield cut(f"{counted(len(self.unread), 'line')} not understood: {self.unread[0]}")

    def _tables(self) -> Iterator[str]:
        products = [
            ((dtypes_of(p), p.kernel or "-", _layers(p.scope), p.source), (p.times, p.flops))
            for p in self.products
        ]
        columns = {"times": ">5", "FLOPs": ">7", "dtypes": "32", "kernel": "8"}
        yield from _table("Products", columns, products)
        moves = [
            (
                (f"{k.kind} {k.operand} -> {k.result}", _layers(k.scope), k.source),
                (k.times, k.nbytes, k.cycles),
            )
            for k in (*self._of("cast"), *self._of("copy"))
        ]
        columns = {"times": ">5", "bytes": ">7", "cycles": ">7", "dtypes": "28"}
        yield from _table("Kernels that only cast or copy", columns, moves)

    def _of(self, kind: str) -> list[CompiledKernel]:
        return [kernel for kernel in self.kernels if kernel.kind == kind]


_PLURAL = {"product": "products", "cast": "casts", "copy": "copies", "other": "others"}


def dtypes_of(product: CompiledProduct) -> str:
    """Returns the dtypes of a product in a few words: operands, result and sums."""
    text = f"{' x '.join(dict.fromkeys(product.operands))} -> {product.result}"
    text = f"conv {text}" if product.kind == "convolution" else text
    return f"{text} (sums too)" if product.sums in ("bfloat16", "float16") else text


def _layers(scope: str) -> str:
    return re.sub(r"\d+", "*", scope)


def _ratio(own: int | None, other: int | None) -> str:
    return f"{own / other:.2f}" if own and other else "-"


def _total(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _number(value: int | None) -> str:
    return "-" if value is None else scaled(value)


def _totals_table(
    own: Mapping[str, int | None], other: Mapping[str, int | None] | None
) -> list[str]:
    """Returns the lines of a table of totals, beside those of another program if there is one."""
    pairs = {name: (own.get(name), (other or {}).get(name)) for name in {**own, **(other or {})}}
    columns = {"": ">9", **({} if other is None else {"against": ">9", "ratio": ">6"}), "total": ""}

    def cells(name: str) -> list[str]:
        mine, theirs = pairs[name]
        beside = [] if other is None else [_number(theirs), _ratio(mine, theirs)]
        return [_number(mine), *beside, name]

    names = [name for name, pair in pairs.items() if pair != (None, None)]
    return table(columns, names, cells, _SHOWN)


def _table(
    title: str,
    columns: dict[str, str],
    rows: Sequence[tuple[tuple[str, ...], tuple[int | None, ...]]],
) -> Iterator[str]:
    """Yields the lines of a table; rows of the same words are one, the largest stand first."""
    groups: dict[tuple[str, ...], list[tuple[int | None, ...]]] = collections.defaultdict(list)
    for words, numbers in rows:
        groups[words].append(numbers)
    merged = [
        (words, [_total(column) for column in zip(*found, strict=True)])
        for words, found in groups.items()
    ]

    def cells(row: tuple[tuple[str, ...], list[int | None]]) -> list[Any]:
        (*words, source), (times, *numbers) = row
        return [times, *map(_number, numbers), *words, source.rpartition("/")[2]]

    if merged:
        merged.sort(key=lambda row: -(row[1][1] or 0))
        columns = {**columns, "scope": "22", "source": ""}
        yield from ("", title, *table(columns, merged, cells, _SHOWN, "more rows"))
