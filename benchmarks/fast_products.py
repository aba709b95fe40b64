"""Which share of a program's products a CPU's library multiplies in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable

from jmp_autocast.inspect import CompiledProduct
from jmp_autocast.inspect.compiled.hlo import parse
from jmp_autocast.inspect.compiled.products import products
from jmp_autocast.inspect.compiled.runs import runs


def products_in(text: str) -> list[CompiledProduct]:
    """Returns the products of the text of a compiled program."""
    module = parse(text)
    found = runs(module, lambda run: run.times)
    return [product for run in found for product in products(run, module, "cpu")]


def share_in_kernels(found: Iterable[CompiledProduct]) -> float:
    """Returns the share of the FLOPs that a library multiplies in bfloat16, from 0 to 1."""
    flops = [(p.flops or 0, p) for p in found]
    fast = sum(n for n, p in flops if p.kernel and p.operands == ("bfloat16", "bfloat16"))
    return fast / max(sum(n for n, _ in flops), 1)
