"""Wrong uses of what `jmp_autocast.integrations` holds beside `nnx.autocast`."""

import flax.linen as nn

from jmp_autocast.integrations import linen

from .row import rows

LINEN = "integrations.linen.autocast"
PUBLIC = {LINEN}


ROWS = rows(
    TypeError,
    {
        "integrations.linen.autocast: a module and no class": (
            lambda w: linen.autocast(nn.Dense(8)),
            "linen.autocast | type Dense | takes a module class | "
            r"autocast\(nn.Dense\)\(8\).*model.apply",
        ),
    },
)
