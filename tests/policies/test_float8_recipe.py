"""The recipe of products in 8 bits: its words, its forms, its errors."""

import dataclasses
import pickle

import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, FP8, Float8, Policy
from jmp_autocast.policies import as_policy, may_use_float8

POLICIES = {
    "preset": FP8,
    "options": Policy(jnp.float16, matmul=Float8("e4m3", "compute", 16, 32, (), True, "row")),
    "scopes": FP8.with_rules({"*": "bfloat16"}, scope="*/head").with_rules(
        {"*": "float8"}, scope="*/mlp"
    ),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_survives_files_and_pickles(policy, tmp_path):
    policy.save(tmp_path / "policy.toml")
    for again in (Policy.load(tmp_path / "policy.toml"), pickle.loads(pickle.dumps(policy))):
        assert again == policy
        assert hash(again) == hash(policy)
        assert may_use_float8(again)


def test_the_forms_of_the_default_recipe():
    forms = [as_policy("compute=bf16,matmul=float8"), Policy("bfloat16", matmul=Float8())]
    assert forms == [FP8, FP8]
    assert (BF16.matmul, may_use_float8(BF16)) == (None, False)


NAMED = {"float8": Float8(), "float8_row": Float8(scaling="row")}


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_has_a_name(name, tmp_path):
    recipe = NAMED[name]
    assert Policy("bfloat16", matmul=name).matmul == recipe
    assert as_policy(f"compute=bf16,matmul={name}").matmul == recipe
    path = tmp_path / "policy.toml"
    lines = "version = 2", "compute_dtype = 'bfloat16'", "[matmul]"
    path.write_text("\n".join([*lines, f"recipe = '{name}'", "minimum = 64"]))
    assert Policy.load(path).matmul == dataclasses.replace(recipe, minimum=64)


WRONG = {
    "blocks of 32": (lambda: Policy("bfloat16", matmul="mxfp8"), ValueError, "write 'float8_row'"),
    "blocks": (lambda: Float8(scaling="block"), ValueError, "no scales of blocks: write 'row'"),
    "a size": (lambda: Float8(minimum=0), ValueError, "Float8.minimum must be at least 1, got 0"),
    "skip": (lambda: Float8(skip="last"), TypeError, r"skip=\('last',\)"),
    "what to skip": (lambda: Float8(skip=("first",)), ValueError, "Float8.skip.*'last'"),
    "emulate": (lambda: Float8(emulate=1), TypeError, "Float8.emulate must be a bool"),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_recipe(make, error, message):
    with pytest.raises(error, match=message):
        make()
