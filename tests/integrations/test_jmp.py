"""`jmp.Policy` in, as ``policy=``, and out, by `to_jmp`."""

import jmp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, CastPolicy, Policy, autocast
from jmp_autocast.integrations.jmp import to_jmp
from tests.support.jaxprs import assert_dots_run_in, trace

X = np.ones((8, 8), np.float32)

# A policy, and the dtypes of parameters, computing and output in jmp's.
OUT = {
    "bfloat16": (BF16, ("float32", "bfloat16", "float32")),
    "float16": (FP16, ("float32", "float16", "float32")),
    "that of the device": (Policy(), ("float32", "bfloat16", "float32")),
    "an output dtype": (Policy("bfloat16", "bfloat16"), ("float32", "bfloat16", "bfloat16")),
    "a string": ("params=float32,compute=float16,output=float16", ("float32", *["float16"] * 2)),
    "a default written out": (Policy("bfloat16", level="o1"), ("float32", "bfloat16", "float32")),
}


@pytest.mark.parametrize(("policy", "expected"), OUT.values(), ids=OUT)
def test_there_and_back(policy, expected):
    found = to_jmp(policy)
    assert isinstance(found, jmp.Policy)
    dtypes = found.param_dtype, found.compute_dtype, found.output_dtype
    assert tuple(np.dtype(d).name for d in dtypes) == expected
    jaxpr = trace(autocast(lambda w, x: x @ w["w"], policy=found), {"w": X}, X)
    assert_dots_run_in(expected[1], jaxpr)
    assert [aval.dtype.name for aval in jaxpr.out_avals] == [expected[2]]


LOST = {
    "level": Policy("bfloat16", level="compute"),
    "rules": BF16.with_rules({"tanh": CastPolicy.FP32}),
    "level, rules": Policy("bfloat16", level="compute").with_rules({"tanh": CastPolicy.FP32}),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_is_named(name):
    with pytest.warns(UserWarning, match=f"nothing else: {name} of the policy") as caught:
        found = to_jmp(LOST[name])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert found == to_jmp(BF16)
