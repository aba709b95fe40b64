"""The same GPT in PyTorch, in float32 and under `torch.autocast`, eager and compiled.

Imported only where torch is installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .cases import Case


class Block(nn.Module):
    """A pre-norm transformer block; attention is written out, as in the Flax model."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = (
            y.view(n, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)
        )
        scores = (q / q.shape[-1] ** 0.5) @ k.transpose(-1, -2)
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1) @ v
        return self.project(mixed.transpose(1, 2).reshape(n, t, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        h = functional.gelu(self.widen(self.norms[1](x)), approximate="tanh")
        return x + self.narrow(h)


class Gpt(nn.Module):
    """A decoder whose output layer is the token embedding."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embed(tokens) + self.position)
        return functional.linear(self.norm(x), self.embed.weight)


def table(case: Case, dtype: str, steps: int) -> list[list[str]]:
    """Returns a table: step time and peak memory of each way to run the GPT on a GPU."""
    sizes = {"heads": 4, **case.sizes}
    torch.manual_seed(0)
    model = Gpt(length=case.inputs[1], **sizes).cuda()
    tokens = torch.randint(0, case.labels, case.inputs, device="cuda")
    low = getattr(torch, dtype)
    ways: list[tuple[str, str, bool, bool]] = [
        ("torch float32, TF32 off", "highest", False, False),
        ("torch float32, TF32 on", "high", False, False),
        ("torch float32, TF32 on, compiled", "high", False, True),
        ("torch autocast", "high", True, False),
        ("torch autocast, compiled", "high", True, True),
    ]
    found = [["", "step ms", "peak MB"]]
    for name, precision, autocast, compiled in ways:
        torch.set_float32_matmul_precision(precision)
        run = torch.compile(model) if compiled else model

        def step(run: Callable = run, autocast: bool = autocast) -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=low, enabled=autocast):
                logits = run(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            scale = 1024.0 if autocast and dtype == "float16" else 1.0
            (scale * loss).backward()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 1e6
        found.append([name, f"{1e3 * statistics.median(times):.2f}", f"{peak:.1f}"])
    return found
