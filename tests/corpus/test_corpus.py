"""The recorder: equal code gives equal texts, and a difference is found."""

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import Policy

from .compare import differing
from .jaxpr_text import first_line_of, jaxpr_text, without_identity
from .program import ALL, FEW, given, plain_policy, rotated
from .sections import sections

X = np.ones((4, 4), np.float32)


def layer(params, x):
    return jnp.tanh(x @ params["w"])


def loop(params, x):
    return jax.lax.scan(lambda h, _: (layer(params, h), None), x, None, length=2)[0]


def text_of(fn, *args):
    return jaxpr_text(jax.make_jaxpr(fn)(*args))


def test_a_program_has_every_section():
    found = sections(given("loop", loop, {"w": X}, X), ALL)
    assert found.keys() == {*(f"plan {setting}" for setting in ALL), "plan of gradient"}
    assert not [text for text in found.values() if text.startswith("raises")]
    assert found["plan o1 bfloat16"] != found["plan o1 float16"]
    assert "  dot_general bfloat16 bfloat16 -> bfloat16 | LOWER" in found["plan o1 bfloat16"]
    again = sections(given("loop", loop, {"w": X}, X), ALL)
    assert not differing(found, again)


def test_another_policy_is_another_text():
    full = lambda setting: plain_policy(setting).with_rules({"tanh": "fp32"})
    plain = sections(given("layer", layer, {"w": X}, X), FEW)
    other = sections(given("layer", layer, {"w": X}, X, policy=full), FEW)
    assert "plan o1 bfloat16" in differing(plain, other)


def test_errors_are_recorded():
    def fails(x):
        raise ValueError(f"no {object()}\nmore")

    found = sections(given("fails", fails, X), FEW)
    assert set(found.values()) == {"raises ValueError: no <object>"}


def test_what_the_text_shows():
    text = text_of(lambda x: x + jnp.asarray(np.arange(4, dtype=np.float32)), X)
    assert "float32[4] " in text
    other = text_of(lambda x: x + jnp.asarray(np.arange(1, 5, dtype=np.float32)), X)
    assert text != other  # the elements of a constant
    assert "2.0:f32[]" in text_of(lambda x: 2 * x, X)
    assert text_of(jnp.sin, 1.0) != text_of(jnp.sin, jnp.float32(1))  # the weak type
    policy = jax.checkpoint_policies.dots_saveable
    assert "dots_saveable" in text_of(jax.checkpoint(jnp.sin, policy=policy), X).lower().replace(
        "dotssaveable", "dots_saveable"
    )


def test_no_address_is_left():
    assert without_identity("<function f.<locals>.g at 0x7f12ab34cd56>") == "<f>"
    assert without_identity("a <b.C object at 0x7f12ab34cd56> d") == "a <object> d"
    assert first_line_of(TypeError("\nfirst\nsecond")) == "TypeError: first"
    rule = jax.custom_vjp(lambda x: jnp.sin(x))
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))
    assert " at 0x" not in text_of(rule, X)


def test_settings_are_shared_out():
    assert {s for i in range(6) for s in rotated(i, 2)} == set(ALL)
    assert all(rotated(i, 3)[0] == ALL[0] and len(set(rotated(i, 3))) == 3 for i in range(9))
    assert str(ALL[0]) == "o1 bfloat16"
    assert plain_policy(ALL[0]) == Policy("bfloat16", level="o1")
