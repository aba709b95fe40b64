"""400 random programs, and proof that the fuzzer sees what is broken; `nox -s long` runs 20,000."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, CastPolicy, Policy, autocast, keep_less, register_rule
from jmp_autocast.interpreters.compat import Tracer
from jmp_autocast.interpreters.plan import equation, marks, votes
from jmp_autocast.interpreters.plan.planner import Planner
from tests.support.jaxprs import inner_jaxprs, trace

from . import campaign, operations_probes, properties
from .__main__ import main
from .generator import Generator, generate
from .program import HEADER, ArrayType, Let, Program, jax_settings
from .properties import Case, Setting, check
from .taken_out import without_link

# Evaluated in NumPy; what compiles or traces often has its turn less often than in a long run.
SHARES = {
    "types": 1.0,
    "values": 0.2,
    "gradients": 0.08,
    "kept": 0.04,
    "idempotent": 0.06,
    "batched": 0.02,
    "compiled": 0.01,
    "disabled": 0.06,
    "untouched": 0.2,
    "between_products": 0.2,
    "leaks": 0.02,
    "deterministic": 0.03,
    "without_jit": 0.02,
    "calls": 0.1,
    "history": 0.02,
    "repeats": 0.05,
}


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_random_programs(block):
    outcomes = [campaign.run(0, 50 * block + i, SHARES) for i in range(50)]
    failed = [o for o in outcomes if o.failures]
    assert not failed, "\n\n".join(f"{o.failures}\n{o.report}" for o in failed)


def test_equal_seeds_give_equal_programs():
    first, second = (campaign.make_case(5, 1)[0] for _ in range(2))
    assert first.program.text() == second.program.text()
    assert first.setting == second.setting
    assert len({generate((5, i)).text() for i in range(20)}) == 20


WEIGHT, DATA, PRODUCT, RESULT = "v1", "v2", "v3", "v4"
MATRIX = ArrayType((5, 5), "float32")
LAYER = Program(
    (WEIGHT,),
    (DATA,),
    {WEIGHT: MATRIX, DATA: MATRIX},
    (
        Let((PRODUCT,), (MATRIX,), f"{DATA} @ {WEIGHT}"),
        Let((RESULT,), (MATRIX,), f"jnp.tanh({PRODUCT})"),
    ),
    (RESULT,),
)


def case_of(program=LAYER):
    rng = np.random.default_rng(0)
    return Case(program, Setting(BF16), campaign.draw_arguments(program, rng), rng)


def around(change):
    """`autocast` with something done to its results."""

    def broken(fn, **options):
        cast = autocast(fn, **options)
        return lambda *args: jax.tree.map(functools.partial(change, args), cast(*args))

    return broken


def twice_for_half(args, x):
    """Right by value; the gradient is twice as large."""
    return x + (x - lax.stop_gradient(x))


def off_by_row(args, x):
    """Wrong in a batch alone, where an operand has one more axis."""
    return x if x.ndim < 3 else x[::-1]


def wrong_again(fn, **options):
    """Right as long as everything is kept."""
    again = keep_less(fn, **options)
    return lambda *args: jax.tree.map(functools.partial(twice_for_half, args), again(*args))


def wrong_of_calls(fn, **options):
    """Rewrites no program that holds a call, a checkpoint or a loop."""

    def broken(*args):
        held = [eqn for eqn in trace(fn, *args).jaxpr.eqns if any(inner_jaxprs(eqn))]
        return (fn if held else autocast(fn, **options))(*args)

    return broken


def wrong_every_third_time(fn, **options):
    """Remembers how often it was asked."""
    dtype = "float16" if next(turns) % 3 == 2 else "bfloat16"
    return autocast(fn, **{**options, "policy": Policy(dtype)})


kept = []
turns = itertools.count()
BROKEN = {
    "types": around(lambda args, x: x.astype(jnp.bfloat16)),
    "values": around(lambda args, x: x * 1.1),
    "gradients": around(twice_for_half),
    "kept": wrong_again,
    "idempotent": around(lambda args, x: jnp.negative(jnp.negative(x))),
    "batched": around(off_by_row),
    "compiled": around(lambda args, x: x * 1.1),
    "disabled": around(lambda args, x: jnp.negative(jnp.negative(x))),
    "between_products": around(lambda args, x: (x.astype(jnp.bfloat16) * 1).astype(x.dtype)),
    "untouched": around(lambda args, x: x.astype(jnp.complex64).real),
    "leaks": around(lambda args, x: kept.append(x) or x),
    "deterministic": around(lambda args, x: x + 1e-9 * next(turns)),
    "without_jit": around(lambda args, x: x if isinstance(x, Tracer) else x * 1.1),
    "calls": wrong_of_calls,
    "history": wrong_every_third_time,
    "repeats": around(lambda args, x: x + 1e-9 * next(turns)),
}


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_each_property_sees_what_breaks_it(name, monkeypatch):
    assert check(case_of(), (name,)) == ([], [])
    transform = "keep_less" if name == "kept" else "autocast"
    monkeypatch.setattr(properties, transform, BROKEN[name])
    failures, _ = check(case_of(), (name,))
    kept.clear()
    assert [f.property for f in failures] == [name]


def probe_case(sampler, seed):
    g = Generator(seed)
    g.x64 = False
    with jax_settings(False):
        assert g.let(sampler(g), "probes")
    program = Program((), (), {}, tuple(g.body), g.body[-1].names)
    return Case(program, Setting(Policy("float16")), ({},), np.random.default_rng(seed))


def plan_whatever_the_states(self, jaxpr, inputs, wanted, path=()):
    key = (id(jaxpr), tuple(want.dtype for want in wanted), path)
    if key not in self._plans:
        self._plans[key] = (jaxpr, self._plan(jaxpr, inputs, wanted, path))
    return self._plans[key][1]


LOST = {
    "literals": (
        operations_probes.beyond,
        lambda patch: patch.setattr(votes, "representable", lambda known, low: True),
    ),
    "sums": (
        operations_probes.long_sum,
        lambda patch: register_rule("reduce_sum", CastPolicy.PROMOTE),
    ),
    "coordinates": (
        operations_probes.rotated,
        lambda patch: [
            patch.setattr(marks, "COUNTED", marks.NONE),
            # A product of positions alone, or of a position and a frequency, sums too little.
            patch.setattr(equation, "cannot_pay", lambda eqn: False),
        ],
    ),
    "states": (
        operations_probes.one_call_for_several_kinds,
        lambda patch: [
            patch.setattr(Planner, "plan", plan_whatever_the_states),
            without_link("leads_to_no_product")(patch),
        ],
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_probes_see_a_lost_promise(name, monkeypatch):
    sampler, lose = LOST[name]
    assert not any(check(probe_case(sampler, i), ("values",))[0] for i in range(8))
    lose(monkeypatch)
    assert any(check(probe_case(sampler, i), ("values",))[0] for i in range(8))


def test_a_failure_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(properties, "autocast", BROKEN["values"])
    outcome = campaign.run(0, 1, {"values": 1.0})
    assert [f.property for f in outcome.failures] == ["values"]
    assert HEADER in outcome.report
    assert outcome.report.count("return (") == 1
    assert main(["--programs", "1", "--start", "1", "--only", "values"]) == 1
    assert "--seed 0 --start 1" in capsys.readouterr().out


def test_the_command_says_what_it_did(capsys):
    assert main(["--programs", "2", "--only", "types"]) == 0
    assert "all passed" in capsys.readouterr().out
