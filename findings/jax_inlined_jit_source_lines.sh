#!/usr/bin/env bash
# jax 0.10.2 and jaxlib 0.10.2, x86-64. With 0.12.0.1, where `inline=True` inlines at lowering, the
# lines stay; with `inline=jax.Inline.JAX_EARLY` they are lost there, too.
# Expected: the operations of a function in `jax.jit(inline=True)` keep their own source lines in the
# lowered program, as those of a function without `inline` do. Seen: each operation carries the line
# of the call, so that a profile shows the whole function on one line.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
cat > "$folder/program.py" <<'PY'
import re

import jax
import jax.numpy as jnp


def layer(x):
    x = jnp.sin(x)
    x = jnp.cos(x)
    return jnp.tanh(x)


def lines(inline):
    function = jax.jit(layer, inline=inline)
    text = jax.jit(lambda x: function(x)).lower(jnp.ones(4)).as_text(debug_info=True)
    return sorted({int(n) for n in re.findall(r'program\.py":(\d+):\d+ to', text)})


own = {8, 9, 10}
kept = {inline: own & set(lines(inline)) for inline in (False, True)}
print(f"lines of the operations: {sorted(kept[False])}, inlined: {sorted(kept[True])}")
raise SystemExit(kept != {False: own, True: set()} and "the behaviour has changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
