"""A `jmp.Policy` as ``policy=``."""

import jmp
import numpy as np
import pytest

from jmp_autocast import autocast
from tests.support.jaxprs import assert_dots_run_in, trace

X = np.ones((8, 8), np.float32)
POLICIES = [
    "params=float32,compute=bfloat16,output=float32",
    "params=float32,compute=float16,output=float32",
    "params=float32,compute=float16,output=float16",
]


@pytest.mark.parametrize("text", POLICIES)
def test_a_policy_of_jmp_is_obeyed(text):
    policy = jmp.get_policy(text)
    jaxpr = trace(autocast(lambda w, x: x @ w["w"], policy=policy), {"w": X}, X)
    assert_dots_run_in(np.dtype(policy.compute_dtype).name, jaxpr)
    assert [aval.dtype for aval in jaxpr.out_avals] == [np.dtype(policy.output_dtype)]
