"""`Emulated` in policies: what a scope may say, and how a file says it."""

import dataclasses

import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, Emulated, Policy
from jmp_autocast.policies import may_use_float8
from jmp_autocast.policies.formats import parse

# What is given for a scope, and the lines of a file that say the same.
SAVED = {
    "a name": ("e4m3", ['dtype = "e4m3"']),
    "a dtype": (jnp.float8_e4m3b11fnuz, ['dtype = "float8_e4m3b11fnuz"']),
    "blocks": ("mxfp6_e3m2", ['dtype = "mxfp6_e3m2"']),
    "options": (
        Emulated("e4m3", "operations", "e3m4", "stochastic", "saturate", 7),
        [
            'dtype = "e4m3"',
            'of = "operations"',
            'gradient = "e3m4"',
            'rounding = "stochastic"',
            'overflow = "saturate"',
            "seed = 7",
        ],
    ),
}


@pytest.mark.parametrize(("given", "lines"), SAVED.values(), ids=SAVED)
def test_a_file_says_it(given, lines, tmp_path):
    policy, path = BF16.with_scopes({"*/mlp": given, "*/ln": "float32"}), tmp_path / "policy.toml"
    policy.save(path)
    text = path.read_text(encoding="utf-8")
    assert text.split('pattern = "*/mlp"\n')[1].splitlines()[: len(lines)] == lines
    again = Policy.load(path)
    assert (again, hash(again)) == (policy, hash(policy))
    assert not may_use_float8(again)


def test_float8_is_the_real_one_and_its_formats_are_emulated():
    scopes = dict(BF16.with_scopes({"a": "float8", "b": "e4m3", "c": "bfloat16"}).scopes)
    assert (scopes["a"], scopes["c"]) == ("float8", jnp.dtype("bfloat16"))
    assert scopes["b"] == Emulated("e4m3", gradient="e5m2")


def test_gradients_have_the_usual_format():
    usual = {"e4m3": "e5m2", "float8_e4m3fn": "e5m2", "e5m2": "e5m2", "mxfp8": "mxfp8"}
    assert {name: Emulated(name).gradient.name for name in usual} == usual


def test_it_is_written_as_it_is_made():
    emulated = Emulated("e4m3", of="parameters", gradient="e4m3", seed=1)
    assert repr(emulated) == "Emulated('e4m3', of='parameters', gradient='e4m3', seed=1)"
    assert eval(repr(BF16.with_scopes({"*": emulated})).replace("bfloat16", "'bfloat16'", 1)).scopes
    assert Emulated(emulated.format) == Emulated("e4m3")


def test_a_format_that_no_name_means_is_not_saved(tmp_path):
    own = dataclasses.replace(parse("mxfp8"), fits=True)
    policy = BF16.with_scopes({"*": Emulated(own)})
    with pytest.raises(TypeError, match=r"no format that its name means\. Pass the name of one"):
        policy.save(tmp_path / "policy.toml")


FILES = {
    "no bits": ("dtype = 'e4'", ValueError, r"scopes\[0\].dtype must name its bits, got 'e4'"),
    "a word": ("dtype = 'e4m3'\nof = 'weights'", ValueError, r"scopes\[0\]: Emulated.of .*got 'we"),
    "a type": ("dtype = 'e4m3'\nseed = 'a'", TypeError, r"scopes\[0\]: Emulated.seed must be"),
    "a key": (
        "dtype = 'e4m3'\nround = 1",
        ValueError,
        "unknown key 'round'. Did you mean 'rounding'",
    ),
    "no format": ("dtype = 'float32'\nseed = 1", ValueError, "has seed, which belong to a number"),
    "float8": ("dtype = 'float8'\ngradient = 'e4m3'", ValueError, "has gradient, .*'float8'"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file(name, tmp_path):
    text, error, message = FILES[name]
    path = tmp_path / "policy.toml"
    lines = "version = 1", "compute_dtype = 'bfloat16'", "[[scopes]]", "pattern = '*'", text
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(error, match=message):
        Policy.load(path)
