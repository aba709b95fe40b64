"""The recorder: equal code gives equal texts, and a difference is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .__main__ import main
from .compare import Options, compare, differing
from .jaxpr_text import jaxpr_text
from .program import ALL, FEW, given
from .record import ABOUT, read, write
from .sections import sections

X = np.ones((8, 8), np.float32)


def layer(params, x):
    return jnp.tanh(x @ params["w"])


def loop(params, x):
    return jax.lax.scan(lambda h, _: (layer(params, h), None), x, None, length=2)[0]


def text_of(fn, *args):
    return jaxpr_text(jax.make_jaxpr(fn)(*args))


def written(folder, recorded):
    folder.mkdir()
    (folder / ABOUT).write_text("{}")
    write(folder / "source.jsonl.gz", recorded)
    return folder


def test_a_program_has_every_section():
    found = sections(given("loop", loop, {"w": X}, X), ALL)
    kinds = {title.split()[0] for title in found}
    assert kinds == {"forward", "gradient", "plan", "computed", "of"}
    assert not [text for text in found.values() if text.startswith("raises")]
    assert found["forward o1 bfloat16"] != found["forward o1 float16"]
    assert "inputs a0:bf16[8,8]" in found["forward o1 bfloat16"]
    assert "  dot_general bfloat16 bfloat16 -> bfloat16 | LOWER" in found["plan o1 bfloat16"]


def test_the_same_program_has_the_same_text():
    once, again = (sections(given("loop", loop, {"w": X}, X), FEW) for _ in range(2))
    assert not differing(once, again)


def test_errors_are_recorded():
    def fails(x):
        raise ValueError(f"no {object()}\nmore")

    found = sections(given("fails", fails, X), FEW)
    assert set(found.values()) == {"raises ValueError: no <object>"}


def test_what_the_text_shows():
    text = text_of(lambda x: x + jnp.asarray(np.arange(8, dtype=np.float32)), X)
    assert "float32[8] " in text
    other = text_of(lambda x: x + jnp.asarray(np.arange(1, 9, dtype=np.float32)), X)
    assert text != other  # the elements of a constant
    assert "2.0:f32[]" in text_of(lambda x: 2 * x, X)
    assert text_of(jnp.sin, 1.0) != text_of(jnp.sin, jnp.float32(1))  # the weak type
    policy = jax.checkpoint_policies.dots_saveable
    assert "dots_saveable" in text_of(jax.checkpoint(jnp.sin, policy=policy), X).lower().replace(
        "dotssaveable", "dots_saveable"
    )


def test_recordings_are_compared(tmp_path, capsys):
    old = written(tmp_path / "old", {"a": {"forward": "leaf_view", "plan": "x"}, "b": {}})
    new = written(tmp_path / "new", {"a": {"forward": "source_view", "plan": "x"}, "b": {}})
    assert read(old, "source")["a"]["plan"] == "x"
    assert compare(old, old, Options()) == 0
    assert compare(old, new, Options()) == 1
    out = capsys.readouterr().out
    assert "source: a: forward" in out
    assert "-leaf_view" in out
    assert "+source_view" in out
    assert compare(old, new, Options(only="plan")) == 0
    assert main(["compare", str(old), str(new), "--only", "plan"]) == 0
    written(tmp_path / "more", {"a": {"forward": "leaf_view"}, "b": {"plan": "y"}})
    more = str(tmp_path / "more")
    assert main(["compare", str(old), more]) == 1
    assert main(["compare", str(old), more, "--common"]) == 0
    with pytest.raises(SystemExit, match="no recording"):
        compare(tmp_path, new, Options())
