"""Wrong uses of what `jmp_autocast.integrations` holds beside `nnx.autocast`."""

import flax.linen as nn
import optax

from jmp_autocast.integrations import linen
from jmp_autocast.integrations.jmp import to_jmp
from jmp_autocast.integrations.metrics import precision_metrics

from .row import Row

LINEN = "integrations.linen.autocast"
METRICS = "integrations.metrics.precision_metrics"
TO_JMP = "integrations.jmp.to_jmp"
PUBLIC = {LINEN, METRICS, TO_JMP}

ROWS = [
    Row(
        LINEN,
        "a module and no class",
        lambda w: linen.autocast(nn.Dense(8)),
        TypeError,
        (
            "linen.autocast | type Dense | takes a module class | "
            r"autocast\(nn.Dense\)\(8\).*model.apply"
        ),
    ),
    Row(
        METRICS,
        "nothing to report",
        lambda w: precision_metrics(),
        TypeError,
        "opt_state | neither | report | Pass the optimizer state",
    ),
    Row(
        METRICS,
        "the text of a report",
        lambda w: precision_metrics(report="100.0 %"),
        TypeError,
        r"report | str | must be a Report | explain\(fn",
    ),
    Row(
        METRICS,
        "a prefix",
        lambda w: precision_metrics(optax.EmptyState(), prefix=3),
        TypeError,
        "prefix | 3 | string | must be",
    ),
    Row(
        TO_JMP,
        "a number",
        lambda w: to_jmp(16),
        TypeError,
        "policy | 16 of type int | must be | params=float32,compute=bfloat16",
    ),
]
