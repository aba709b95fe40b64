"""The autocast that a newcomer reads first agrees with the package where no exception applies."""

import collections
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import Policy, autocast, explain
from tests.corpus.program import Arguments
from tests.corpus.sources import SOURCES
from tests.support.markdown_pages import ROOT

PATH = ROOT / "docs" / "design" / "autocast_in_150_lines.py"
# At this level inputs of the program have no vote, as in the 150 lines.
POLICY = Policy("bfloat16", level="compute")

# What a program of the corpus has that leaves it out.
NO_PRODUCT = "no product: nothing has 16 bits"
CONTROL = "loops, branches or shards, which the 150 lines do not plan"
PREPARED = "equations that the package removes or adds before it plans"
WIDE = "a product in float32: of vectors, of four elements, of a solve, or of a given precision"
CONSUMERS = "a value that its consumers need in float32"
ACCUMULATOR = "a product that returns both its float32 accumulator and 16 bits"
# Their derivatives count ties or add up cotangents, in float32.
ADDS_UP = ("gather", "reduce_max", "reduce_min")
COUNTS_TIES = ("scatter-max", "scatter-min")
REASONS = (NO_PRODUCT, CONTROL, PREPARED, WIDE, CONSUMERS, ACCUMULATOR)


@pytest.fixture(scope="module")
def small():
    spec = importlib.util.spec_from_file_location("autocast_in_150_lines", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chosen():
    """473 programs that trace fast."""
    for name in ("contractions", "custom_rules", "structures", "transformed"):
        yield from SOURCES[name]()
    yield from list(SOURCES["conformance"]())[::3]


def name(dtype):
    return getattr(dtype, "name", None) or jnp.dtype(dtype).name


def difference(small, fn, args):
    """Why a program is left out, or the first row that no reason explains; None if all agree."""
    explained = explain(fn, *args, policy=POLICY).rows
    rows = [row for row in explained if row.reason != "STRUCTURAL"]
    products = {row.reason for row in rows if row.primitive in small.PRODUCTS}
    if {row.primitive for row in explained if row.reason == "STRUCTURAL"} - {*small.CALLS}:
        return CONTROL
    if products != {"LOWER_PRECISION"}:
        return WIDE if products else NO_PRODUCT
    program = small.plan(fn, *args)[0]
    if [row.primitive for row in rows] != [eqn.primitive.name for eqn in program]:
        return PREPARED
    low = set()
    for row, eqn in zip(rows, program, strict=True):
        low |= {v for v, dtype in zip(eqn.results, row.results, strict=True) if dtype == "bfloat16"}
        operands = tuple(name(eqn.dtype if v.is_float else v.dtype) for v in eqn.operands)
        if (operands, tuple(name(v.dtype) for v in eqn.results)) != (row.operands, row.results):
            reads = zip(eqn.operands, row.operands, strict=True)
            of_accumulator = any(v in low and dtype == "float32" for v, dtype in reads)
            if row.reason == "PROMOTE_FULL" and of_accumulator:
                return ACCUMULATOR
            adds_up = row.reason == "NO_PRODUCT" and row.primitive in ADDS_UP
            if adds_up or row.primitive in COUNTS_TIES:
                return CONSUMERS
            return CONSUMERS if row.reason in ("FEEDER", "LOG_GUARD") else row
    return None


@pytest.mark.slow  # 10 s
def test_dtypes_agree_where_no_exception_applies(small, as_users_run_it):
    found = collections.Counter()
    for program in chosen():
        with program.context():
            fn, args = program.build()
            arguments = Arguments(args, program.derive)
            why = difference(small, arguments.flat(fn), arguments.arrays())
        assert why in (None, *REASONS), program.name
        found[why] += 1
    assert found[None] >= 200, found
    assert found[CONSUMERS] + found[ACCUMULATOR] < found[None] / 5, found


def layer(w, x):
    return jax.nn.softmax(jax.nn.gelu(x @ w) @ w.T)


def attention(w, x):
    scores = (x @ w) @ x.T / 4.0
    return jax.nn.softmax(jnp.where(jnp.tri(8) > 0, scores, -1e9)) @ jax.nn.relu(x @ w)


@pytest.mark.parametrize("fn", [layer, attention])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_agree_to_the_bit(small, fn, dtype, standard_promotion):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 8), (8, 8)))
    ours = autocast(fn, Policy(dtype, level="compute"))(w, x)
    theirs = small.autocast(fn, jnp.dtype(dtype))(w, x)
    assert ours.dtype == theirs.dtype == jnp.float32
    assert (np.asarray(ours) == np.asarray(theirs)).all()
    assert jax.grad(lambda w: small.autocast(fn)(w, x).sum())(w).dtype == jnp.float32


def test_the_file_has_150_lines_and_runs(small):
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 150
    dtypes = [eqn.dtype for eqn in small.plan(layer, jnp.ones((8, 8)), jnp.ones((4, 8)))[0]]
    assert {jnp.dtype(dtype).name for dtype in dtypes} == {"bfloat16", "float32"}
