"""Wrong uses of what `jmp_autocast.integrations` holds beside `nnx.autocast`."""

import flax.linen as nn
import optax

from jmp_autocast.integrations import linen
from jmp_autocast.integrations.jmp import to_jmp
from jmp_autocast.integrations.metrics import precision_metrics

from .row import rows

LINEN = "integrations.linen.autocast"
METRICS = "integrations.metrics.precision_metrics"
TO_JMP = "integrations.jmp.to_jmp"
PUBLIC = {LINEN, METRICS, TO_JMP}


ROWS = rows(
    TypeError,
    {
        "integrations.linen.autocast: a module and no class": (
            lambda w: linen.autocast(nn.Dense(8)),
            "linen.autocast | type Dense | takes a module class | "
            r"autocast\(nn.Dense\)\(8\).*model.apply",
        ),
        "integrations.metrics.precision_metrics: nothing to report": (
            lambda w: precision_metrics(),
            "opt_state | neither | report | Pass the optimizer state",
        ),
        "integrations.metrics.precision_metrics: the text of a report": (
            lambda w: precision_metrics(report="100.0 %"),
            r"report | str | must be a Report | explain\(fn",
        ),
        "integrations.metrics.precision_metrics: a prefix": (
            lambda w: precision_metrics(optax.EmptyState(), prefix=3),
            "prefix | 3 | string | must be",
        ),
        "integrations.jmp.to_jmp: a number": (
            lambda w: to_jmp(16),
            "policy | 16 of type int | must be | params=float32,compute=bfloat16",
        ),
    },
)
