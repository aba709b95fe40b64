"""`output_dtype` as a pytree: a dtype for each part of what a function returns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, Policy, autocast


class Step(NamedTuple):
    logits: jax.Array
    cache: dict
    note: str


W, X = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jnp.linspace(0.0, 3.0, 16).reshape(2, 8)


def step(params, x):
    h = x @ params["w"]
    cache = {"k": jnp.exp(h), "v": jnp.tanh(h), "count": jnp.int32(3)}
    return Step(jax.nn.softmax(h), cache, "static")


@pytest.mark.parametrize(
    ("wanted", "dtypes"),
    [
        (Step("same", jnp.bfloat16, "same"), "float32 int32 bfloat16 bfloat16"),
        (Step("same", {"k": "float16", "v": "same", "count": "same"}, "same"),
         "float32 int32 float16 float32"),
        (Step("bfloat16", "same", "same"), "bfloat16 int32 float32 float32"),
    ],
)  # fmt: skip
def test_each_part_gets_its_dtype(wanted, dtypes):
    same = jax.jit(lambda p, x: autocast(step, policy=BF16)(p, x)[:2])
    fn = autocast(step, policy=BF16, output_dtype=wanted)
    out, expected = jax.jit(lambda p, x: fn(p, x)[:2])({"w": W}, X), same({"w": W}, X)
    assert [x.dtype.name for x in jax.tree.leaves(out)] == dtypes.split()
    assert fn({"w": W}, X).note == "static"
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.float64(a), np.float64(b.astype(a.dtype))),
        out,
        expected,
    )
    gradient = jax.grad(lambda p: jnp.sum(fn(p, X).cache["v"].astype(jnp.float32)))({"w": W})
    assert gradient["w"].dtype == jnp.float32


def test_same_stands_for_the_policy_and_equal_prefixes_are_equal():
    policy = Policy("bfloat16", output_dtype="float16")
    make = lambda: autocast(step, policy=policy, output_dtype=Step("same", "float32", "same"))
    assert make() is make()
    out = jax.eval_shape(lambda p, x: make()(p, x)[:2], {"w": W}, X)
    assert [x.dtype.name for x in jax.tree.leaves(out)] == "float16 int32 float32 float32".split()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("same", "computed"), "is for all outputs"),
        (("same", "int8"), "or a pytree of 'same' and dtypes, got int8"),
        (("same", None), "got None"),
        ({"a": "same"}, "must be a prefix of what the function returns"),
    ],
)
def test_wrong_prefixes_are_refused(wanted, message):
    with pytest.raises(ValueError, match=message):
        autocast(step, policy=BF16, output_dtype=wanted)({"w": W}, X)


def total(w, x):
    e = jnp.tanh(x @ w)
    with jax.named_scope("total"):
        return {"energy": jnp.sum(e + 1e6), "nodes": e}


@pytest.mark.parametrize(
    ("wanted", "energy", "nodes"),
    [
        ("same", "float32", "float32"),
        ("computed", "float64", "bfloat16"),
        (jnp.float64, "float64", "float64"),
        ({"energy": "float64", "nodes": "same"}, "float64", "float32"),
        (jnp.bfloat16, "bfloat16", "bfloat16"),
    ],
)
def test_an_island_keeps_its_digits_for_who_asks(wanted, energy, nodes):
    policy = BF16.with_rules({"*": "float64"}, scope="*total")
    fn = autocast(total, policy=policy, output_dtype=wanted)
    with jax.enable_x64(True):
        out = jax.jit(fn)(W, X)
        exact = np.sum(np.float64(autocast(total, policy=BF16)(W, X)["nodes"]) + 1e6)
        assert (out["energy"].dtype.name, out["nodes"].dtype.name) == (energy, nodes)
        if energy == "float64":
            np.testing.assert_allclose(out["energy"], exact, rtol=1e-9)


def test_float64_outputs_need_float64():
    with pytest.raises(ValueError, match=r"output_dtype asks for float64.*jax_enable_x64"):
        autocast(total, policy=BF16, output_dtype="float64")(W, X)
