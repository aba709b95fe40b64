"""All FLOPs of a compiled program are those that XLA's own cost analysis counts."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_autocast.inspect.compiled.arithmetic import flops_in
from jmp_autocast.inspect.compiled.hlo import parse
from tests.support.hlo_texts import module_of

X = (8, 16, 16, 4)

PROGRAMS = {
    "elementwise": (lambda x: jnp.tanh(x) * x + jnp.where(x > 0, x, 1), (X,)),
    "a reduction": (lambda x: jnp.sum(x, (1, 2)) + jnp.max(x), (X,)),
    "windows": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
        (X,),
    ),
    "windows over all of a row": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 127), (1, 1), ((0, 0), (63, 63))),
        ((8, 64),),
    ),
    "a pool backwards": (
        jax.grad(
            lambda x: jnp.sum(
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
            )
        ),
        (X,),
    ),
    "a convolution with padding": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (X, (3, 3, 4, 8)),
    ),
    "a loop": (
        lambda x, w: lax.fori_loop(0, 7, lambda _, h: jnp.cos(h @ w), x),
        ((8, 16), (16, 16)),
    ),
    "a branch": (
        lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x + 1, x),
        ((8, 16), (16, 16)),
    ),
    "a scatter": (lambda x: x.at[jnp.array([1, 1])].add(2.0), ((8, 16),)),
    "a sort": (lambda x: jnp.sort(x), ((64,),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_flops(name):
    fn, shapes = PROGRAMS[name]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(fn).lower(*arguments).compile()
    expected = compiled.cost_analysis()["flops"]
    found = flops_in(parse(compiled.as_text()))
    assert found == pytest.approx(expected, rel=0.05, abs=8), (found, expected)


def test_a_loop_counts_once_or_as_often_as_it_runs():
    fn, shapes = PROGRAMS["a loop"]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    module = parse(jax.jit(fn).lower(*arguments).compile().as_text())
    step = 2 * 8 * 16 * 16
    assert step <= flops_in(module) < 1.1 * step
    assert 7 * step <= flops_in(module, loops=True) < 1.1 * 7 * step


SUM = """
%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}
"""


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("f32[8]{0} all-reduce(%x), to_apply=%add", 8),
        ("f32[8]{0} map(%x, %x), to_apply=%add", 8),
        ("f32[8]{0} call(%x), to_apply=%add", 1),
        ("f32[8]{0} reduce-window(%x, %x), window={size=15 pad=7_7}, to_apply=%add", 1 + 7),
        ("f32[8]{0} reduce-window(%x, %x), window={size=13 pad=6_6}, to_apply=%add", 8 * 12),
        ('f32[8]{0} custom-call(%x), custom_call_target="mine"', 0),
    ],
)
def test_flops_of_an_instruction(line, flops):
    text = module_of("%x = f32[8]{0} parameter(0)", f"ROOT %y = {line}", before=SUM)
    assert flops_in(parse(text)) == flops
