"""Seconds of PyTorch on a CPU, for the programs of ``benchmarks/cpu.py`` that it can run alike.

    python benchmarks/cpu_torch.py            # needs torch alone, and a quiet machine

Float32 and ``torch.autocast("cpu", torch.bfloat16)`` take turns in one process. The models have the
sizes of those in ``benchmarks/cpu.py``; attention is PyTorch's own fused one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, POSITIONS = 4, 512, 8, 8192, 8, 256


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """Adds attention and a multilayer perceptron to what comes in."""
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder whose output layer is the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(n, WIDTH) for n in (VOCABULARY, POSITIONS))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Any) -> Any:
        """Returns logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class Basic(nn.Module):
    """A basic block of a residual network."""

    def __init__(self, before: int, features: int, by: int) -> None:
        super().__init__()
        conv = lambda a, size, by: nn.Conv2d(a, features, size, by, size // 2, bias=False)
        self.convs = nn.ModuleList([conv(before, 3, by), conv(features, 3, 1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(features) for _ in range(2)])
        same = before == features and by == 1
        self.short = (
            nn.Identity() if same else nn.Sequential(conv(before, 1, by), nn.BatchNorm2d(features))
        )

    def forward(self, x: Any) -> Any:
        """Adds two convolutions to what comes in."""
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(self.short(x) + self.norms[1](self.convs[1](y)))


def gpt() -> tuple[Any, Any, Any, Any]:
    """Returns model, inputs, labels and optimizer."""
    model, tokens = Gpt(), torch.randint(0, VOCABULARY, (BATCH, POSITIONS + 1))
    tx = torch.optim.AdamW(model.parameters(), 1e-4)
    return model, tokens[:, :-1], tokens[:, 1:].reshape(-1), tx


def resnet() -> tuple[Any, Any, Any, Any]:
    """Returns model, inputs, labels and optimizer."""
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks = [Basic(64, 64, 1), Basic(64, 128, 2), Basic(128, 256, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)]
    model = nn.Sequential(*stem, *blocks, *head).to(memory_format=torch.channels_last)
    images = torch.randn(16, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    tx = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    return model, images, torch.randint(0, 100, (16,)), tx


def step_of(make: Callable[[], tuple[Any, Any, Any, Any]]) -> Callable[[bool], None]:
    """Returns a training step, with `torch.autocast` or without."""
    model, inputs, labels, tx = make()

    def step(low: bool) -> None:
        tx.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = model(inputs)
        F.cross_entropy(logits.float().flatten(0, -2), labels).backward()
        tx.step()

    return step


def main() -> None:
    """Prints a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("| step | float32: min, median, ms | torch.autocast | times float32 |\n|---|---|---|---|")
    for name, make in (("GPT", gpt), ("ResNet", resnet)):
        step, seconds = step_of(make), {False: [], True: []}
        for turn in range(rounds + 1):
            for low, taken in seconds.items():
                start = time.perf_counter()
                step(low)
                if turn:
                    taken.append(time.perf_counter() - start)
        text = [f"{1e3 * min(s):.1f}, {1e3 * statistics.median(s):.1f}" for s in seconds.values()]
        print(f"| {name} | {' | '.join(text)} | {min(seconds[False]) / min(seconds[True]):.2f} |")


if __name__ == "__main__":
    main()
