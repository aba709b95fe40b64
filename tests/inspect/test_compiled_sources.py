"""The programs of `explain_compiled`: functions, lowered and compiled programs, and texts."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import explain_compiled
from jmp_autocast.inspect.compiled.explain_compiled import _of_executable, platform_of
from jmp_autocast.inspect.compiled.hlo import UnreadableError
from tests.support.hlo_texts import TEXTS

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
LOWERED = jax.jit(jnp.matmul).lower(X, W)
COMPILED = LOWERED.compile()


def test_all_that_is_taken_gives_one_report():
    first = explain_compiled(COMPILED)
    assert first.temporary is not None
    for program, args in ((jnp.matmul, (X, W)), (jax.jit(jnp.matmul), (X, W)), (LOWERED, ())):
        found = explain_compiled(program, *args)
        assert (found.by_dtype(), found.temporary, found.platform) == (
            first.by_dtype(),
            first.temporary,
            "cpu",
        )
    text = explain_compiled(COMPILED.as_text())
    assert (text.products, text.kernels, text.temporary) == (first.products, first.kernels, None)


def test_the_compiler_is_known_by_its_text():
    kept = {path.stem: platform_of(path.read_text("utf-8")) for path in TEXTS.glob("*.txt")}
    assert len(kept) == 5
    assert all(name.startswith(platform) and platform for name, platform in kept.items())
    assert platform_of("HloModule m") == ""


class Mute:
    """An executable of a v6e in jaxlib 0.10."""

    def as_text(self):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: cannot print")


def test_an_executable_without_a_text_is_to_be_dumped():
    with pytest.raises(UnreadableError, match=r"cannot print\. .*xla_dump_to"):
        _of_executable(Mute())
