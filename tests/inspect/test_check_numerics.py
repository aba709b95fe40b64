"""`check_numerics` names the producer of the first infinity or NaN, and no other equation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import check_numerics
from tests.support.faulty_programs import FAULTS, X, on_devices, planted_line


def report_of(fn, *args, mode="collect"):
    return check_numerics(fn, mode=mode)(*args)[1]


def blamed(report):
    return [row.primitive for row in report.bad]


def name(fault):
    options = getattr(fault.checked, "__name__", "")
    return f"{fault.function.__qualname__}-{options}"


@pytest.mark.parametrize("fault", FAULTS, ids=name)
def test_a_planted_fault(fault, jit_caches):
    checked = fault.checked or fault.function
    result, report = check_numerics(checked, mode="collect")(*fault.args)
    first = report.first
    assert first.source.startswith(planted_line(fault.function))
    assert (first.primitive, first.scope, first.inside) == (
        fault.primitive,
        fault.scope,
        fault.inside,
    )
    assert (first.nan, first.inf) == fault.made
    assert (first.first_run, first.runs, first.backward) == (*fault.run, fault.backward)
    plain = jax.jit(checked)(*fault.args)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    with pytest.raises(FloatingPointError) as caught:
        check_numerics(checked)(*fault.args)
    message = str(caught.value)
    assert f"{fault.primitive} makes " in message
    assert planted_line(fault.function) in message
    assert (f"scope {fault.scope}\n" if fault.scope else "in no scope\n") in message
    assert ("in the backward pass" in message) == fault.backward
    told = re.search(r"first in run (\d+) of ([\d,]+), counted from 0", message)
    assert (told is not None) == (first.runs > 1)
    if told:
        assert tuple(map(int, told.groups())) == fault.run


def test_what_follows_from_the_first_fault():
    """The backward pass of a masked logarithm: 0 / 0, before the mask."""

    def loss(x):
        return jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))

    first, second = report_of(jax.grad(loss), X).bad
    assert (first.primitive, first.inf, first.nan, first.backward) == ("log", 1, 0, False)
    assert (second.primitive, second.inf, second.nan, second.backward) == ("div", 0, 1, True)
    assert first.order < second.order


def test_an_earlier_iteration_comes_first():
    """Equation 2 of iteration 1 is earlier than equation 1 of iteration 2."""

    def step(i, y):
        early = 1.0 / (i.astype(jnp.float32) - 2.0)
        late = jnp.log(jnp.abs(i.astype(jnp.float32) - 1.0))
        return y + early * 0.0 + jnp.maximum(late, 0.0)

    report = report_of(lambda x: lax.fori_loop(0, 4, step, x), np.float32(0))
    bad = [(row.primitive, row.first_run) for row in report.bad]
    assert bad == [("log", 1), ("div", 2), ("mul", 2)]
    assert [row.bad_runs for row in report.bad] == [1, 1, 1]
    orders = [row.order for row in report.bad]
    assert orders == sorted(orders)
    rows = [row.primitive for row in report.rows]
    assert rows.index("div") < rows.index("log")


def masked_scores(x):
    mask = jnp.tri(3, dtype=bool)
    scores = jnp.where(mask, x[:, None] * x, -jnp.inf)
    return jax.nn.softmax(scores), jax.nn.logsumexp(scores, axis=-1)


def mask_through_calls(x):
    masked = jax.jit(lambda x: jnp.where(x > 0, x, -jnp.inf))
    top = lax.cond(jnp.sum(x) > 0, lambda y: y * 2.0, lambda y: y, masked(x))
    return jax.checkpoint(jnp.exp)(top)


@pytest.mark.parametrize("fn", [masked_scores, mask_through_calls])
def test_what_is_written_down_is_no_fault(fn):
    report = report_of(fn, X)
    assert report.first is None, report
    assert sum(row.inf for row in report.rows)
    check_numerics(fn)(X)


def arithmetic(x):
    return jnp.tanh(x @ np.ones((3, 3), np.float32)) - jnp.mean(x / jnp.sum(x * x))


def loops(x):
    def step(y, z):
        return lax.cond(z > 0, jnp.sin, jnp.exp, y) + z, jnp.sum(y)

    y, sums = lax.scan(step, x, x)
    y = lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y + 1.0, y)
    return lax.fori_loop(0, 3, lambda i, y: jax.checkpoint(jnp.sin)(y), y), sums


def collectives(x):
    total = lax.psum(jnp.sin(x), "devices") + lax.pmax(x, "devices")
    rest = lax.all_gather(x, "devices")[0] + lax.ppermute(x, "devices", [(0, 1), (1, 0)])
    step = lambda i, y: jnp.cos(y) + lax.psum(y, "devices")
    return lax.fori_loop(0, 3, step, total + rest)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("fn", [arithmetic, loops, jax.grad(lambda x: jnp.sum(arithmetic(x)))])
def test_nobody_in_the_program_is_blamed_for_its_input(fn, bad):
    x = X.copy()
    x[1] = bad
    report = report_of(fn, x)
    # An infinity may become a NaN.
    assert all(row.nan and not np.isnan(bad) for row in report.bad), report
    assert any(row.nan for row in report.rows)


@pytest.mark.parametrize("check_vma", [True, False])
def test_nobody_is_blamed_for_what_another_device_brings(check_vma, jit_caches):
    x = np.arange(8, dtype=np.float32)
    x[3] = np.nan
    report = report_of(on_devices(collectives, "rows", check_vma=check_vma), x)
    assert report.bad == []
    assert {row.runs for row in report.rows} == {8, 24}


def test_nobody_is_blamed_for_what_another_element_of_a_mapped_axis_brings():
    x = np.array([1, np.nan], np.float32)
    fn = check_numerics(lambda x: lax.psum(x, "batch"), mode="collect")
    total, report = jax.vmap(fn, axis_name="batch")(x)
    assert np.isnan(total).all()
    assert report.bad == []


def test_an_infinity_of_a_mask_excuses_no_nan():
    def fn(x):
        masked = jnp.where(x > 0, x, -jnp.inf)
        return masked - jnp.max(masked, keepdims=True)

    assert blamed(report_of(fn, -X)) == ["sub"]
    assert blamed(report_of(fn, X)) == []


def test_the_branch_not_taken_is_not_run():
    def fn(x):
        return lax.cond(x > 0, lambda x: x + 1.0, lambda x: jnp.log(x), x)

    report = report_of(fn, np.float32(1))
    assert {row.primitive: row.runs for row in report.rows} == {"add": 1, "log": 0}
    assert report.first is None
    assert report_of(fn, np.float32(0)).first.primitive == "log"


def test_integers_and_empty_arrays_are_ignored():
    def fn(x, i):
        empty = jnp.log(x[:0])
        return jnp.sum(empty), i * 2**30 * 4, jnp.argmax(x), x > 0

    report = report_of(fn, X, jnp.arange(3))
    assert [row.primitive for row in report.rows] == ["reduce_sum"]
    assert report.first is None
