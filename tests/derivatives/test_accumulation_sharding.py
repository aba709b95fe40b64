"""Accumulating contractions on meshes, and what they are lowered to on each platform."""

import contextlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jmp_autocast import cpu_kernels
from jmp_autocast.interpreters.compat import jaxpr_as_fun
from tests.support.contractions import TABLE, TRANSFORMS, accumulating, arguments, dot, quadratic
from tests.support.jaxprs import assert_dots_run_in, trace

DTYPES = ["bfloat16", "float16"]


def mesh(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


SHARDED = {
    "dense": (dot((8, 4, 16), (16, 8), ((2,), (0,))), P("data"), P(None, "model")),
    "batch": (
        dot((4, 4, 16), (4, 8, 16), ((2,), (2,)), ((0,), (0,))),
        P("data", "model"),
        P("data"),
    ),
}


@pytest.mark.parametrize("transform", ["grad", "jvp", "hvp", "vmap_of_grad_over_leaves", "scan"])
@pytest.mark.parametrize("case", SHARDED.values(), ids=SHARDED)
def test_explicit_mesh_axes(case, transform):
    row, *specs = case
    transform = TRANSFORMS[transform]
    with jax.set_mesh(mesh(AxisType.Explicit)):
        args = [jax.device_put(a, s) for a, s in zip(arguments(row), specs, strict=True)]
        jaxpr = trace(transform(quadratic(accumulating(row[2], "bfloat16"))), *args)
        plain = trace(transform(quadratic(row[2])), *args)
        assert_dots_run_in("bfloat16", jaxpr)
        types = [[v.aval for v in j.jaxpr.outvars] for j in (jaxpr, plain)]
        assert types[0] == types[1]  # shardings are part of the type
        found, expected = (jax.jit(jaxpr_as_fun(j))(*args) for j in (jaxpr, plain))
    for a, b in zip(found, expected, strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def test_one_contraction_on_several_meshes():
    """With the caches of JAX, which the check for leaks turns off."""
    row, *specs = SHARDED["dense"]
    gradient = jax.grad(quadratic(accumulating(row[2], "bfloat16")), (0, 1))
    expected = jax.grad(quadratic(row[2]), (0, 1))(*arguments(row))
    meshes = (AxisType.Auto, AxisType.Explicit, None, AxisType.Explicit, AxisType.Auto)
    with jax.check_tracer_leaks(False):
        for axis_type in meshes:
            on = mesh(axis_type) if axis_type else contextlib.nullcontext()
            args = arguments(row)
            if axis_type:
                shardings = [NamedSharding(on, s) for s in specs]
                args = jax.device_put(args, shardings)
                on = jax.set_mesh(on)
            with on:
                found = jax.jit(gradient)(*args)
            for a, b, c in zip(found, expected, args, strict=True):
                np.testing.assert_array_equal(a, b)
                if axis_type is AxisType.Explicit:
                    assert a.sharding.is_equivalent_to(c.sharding, a.ndim)


# --- lowering --------------------------------------------------------------------------------

OPERATION = re.compile(r"(?:dot_general|convolution|ragged_dot)\b.*:\s*\((.*)\) -> (\S+)")


def element_types(text):
    """(operand, operand, result) element types of the contractions of a StableHLO module."""
    return [
        tuple(re.findall(r"tensor<(?:\d+x)*(\w*f\d+)>", " ".join(found.groups())))
        for found in OPERATION.finditer(text)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dense", "batch_and_two", "depthwise", "batch_groups", "ragged"])
def test_on_a_gpu_contractions_read_16_bits_and_write_float32(name, dtype, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "cpu_features", lambda: frozenset())
    row = TABLE[name]
    gradient = jax.grad(quadratic(accumulating(row[2], dtype)), (0, 1))
    traced = jax.jit(gradient).trace(*arguments(row))
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    on_gpu = element_types(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert sorted(on_gpu) == sorted([(short, short, "f32")] * 2 + [(short, short, short)])
    on_cpu = element_types(traced.lower(lowering_platforms=("cpu",)).as_text())
    # Without kernels for bfloat16; `tests/rewrite/test_cpu_forms.py` has them. XLA:CPU would add up
    # some forms of the third in bfloat16, none in float16.
    third = ("f32" if dtype == "bfloat16" else short,) * 3
    assert sorted(on_cpu) == sorted([("f32", "f32", "f32")] * 2 + [third])
