"""Policies that no file can hold, and files that cannot be written: what was there stays."""

import os

import pytest

from jmp_autocast import BF16, CastPolicy, Policy


@pytest.fixture
def path(tmp_path):
    return tmp_path / "policy.toml"


def my_rule(eqn):
    return CastPolicy.FP32


class Rule:
    def __call__(self, eqn):
        return CastPolicy.FP32

    def __repr__(self):
        return "<a rule>"


FUNCTIONS = {
    "a function": (my_rule, "my_rule"),
    "an object": (Rule(), "<a rule>"),
}
SURROGATES = {
    "a name": ("*", "a\ud800", CastPolicy.KEEP),
    "a pattern": ("a\udfff", "*", "float32"),
}


def unwritable():
    for what, (rule, name) in FUNCTIONS.items():
        policy = BF16.with_rules({"exp": "KEEP", "tanh": rule})
        parts = ["primitive 'tanh'", name, "a policy's name", "register_rule('tanh', ...)"]
        yield pytest.param(policy, TypeError, parts, id=what)
        policy = BF16.with_rules({"tanh": rule}, scope="*/head")
        yield pytest.param(policy, TypeError, parts, id=f"{what} in a scope")
    for what, rule in SURROGATES.items():
        parts = ["a\\ud", "surrogate pair", "Remove it"]
        yield pytest.param(Policy(rules=(rule,)), ValueError, parts, id=f"a surrogate in {what}")


@pytest.mark.parametrize("there", [None, "what was there"])
@pytest.mark.parametrize(("policy", "error", "parts"), list(unwritable()))
def test_a_policy_that_cannot_be_saved(policy, error, parts, there, path):
    if there:
        path.write_text(there, "utf-8")
    with pytest.raises(error) as caught:
        policy.save(path)
    assert caught.type is error
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert [p.read_text("utf-8") for p in path.parent.iterdir()] == ([there] if there else [])


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there(step, path, monkeypatch):
    path.write_text("what was there", "utf-8")

    def fail(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="the disk is full"):
        BF16.save(path)
    assert os.listdir(path.parent) == [path.name]
    assert path.read_text("utf-8") == "what was there"


def test_a_link_stays_a_link(path):
    link = path.with_name("link.toml")
    link.symlink_to(path)
    BF16.save(link)
    assert link.is_symlink()
    assert Policy.load(path) == Policy.load(link) == BF16
