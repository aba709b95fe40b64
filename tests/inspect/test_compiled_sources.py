"""What `explain_compiled` takes: functions, what JAX lowered or compiled, and texts."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import explain_compiled
from jmp_autocast.inspect.compiled import sources
from jmp_autocast.inspect.compiled.hlo import UnreadableError
from jmp_autocast.inspect.compiled.sources import platform_of
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


def test_options_of_the_compiler_are_those_of_jit():
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        explain_compiled(jnp.sin, X, compiler_options={"no_such_option": True})


def test_the_compiler_is_known_by_its_text():
    kept = {path.stem: platform_of(path.read_text("utf-8")) for path in TEXTS.glob("*.txt")}
    assert len(kept) == 5
    assert all(name.startswith(platform) and platform for name, platform in kept.items())
    assert platform_of("HloModule m") == ""


class Mute:
    """What jaxlib 0.10 makes for a v6e."""

    def as_text(self):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: cannot print")


def test_what_xla_cannot_print_is_to_be_dumped():
    with pytest.raises(UnreadableError, match=r"cannot print\. .*xla_dump_to"):
        sources._of_compiled(Mute())


class Silent:
    """A compiled program of a backend that tells nothing."""

    input_shardings = output_shardings = ()

    def as_text(self):
        return None

    def memory_analysis(self):
        return None


def test_a_backend_that_tells_nothing():
    assert sources._of_compiled(Silent()) == ("", "", None)
