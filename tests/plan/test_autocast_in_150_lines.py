"""The autocast that a newcomer reads first agrees with the package, where no exception applies."""

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

# Why a program of the corpus is left out before dtypes are compared...
NO_PRODUCT = "it has no product"
CONTROL = "it has loops, branches, shards, or derivative rules called inside"
PREPARED = "the package plans other equations: it removes dead ones and casts integers in products"
# ... and why an equation may differ, by the reason that `explain` gives.
EXCEPTIONS = {
    "FEEDER": "its consumers are float32, or need digits",
    "LOG_GUARD": "its consumers need digits",
    "ACCUMULATOR": "it is added to again and again",
    "LITERAL": "16 bits do not hold a literal",
    "COORD": "it multiplies positions",
    "DOT_OUT": "the accumulator of a product is returned",
    "USER_CAST": "the program casts",
    "USER_PRECISION": "the program asks for a precision",
    "DOMAIN": "it has complex operands, or float64",
    "VECTORS": "a product of vectors, or of four elements and fewer",
    "SHARED": "its producer is a product whose accumulator is consumed, too",
}


@pytest.fixture(scope="module")
def small():
    spec = importlib.util.spec_from_file_location("autocast_in_150_lines", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chosen():
    """About 400 programs that trace fast."""
    for name in ("contractions", "custom_rules", "structures", "transformed"):
        yield from SOURCES[name]()
    yield from list(SOURCES["conformance"]())[::3]


def name(dtype):
    return getattr(dtype, "name", None) or jnp.dtype(dtype).name


def difference(small, fn, args):
    """Why a program is left out, or by which exception it differs; None if all dtypes agree."""
    explained = explain(fn, *args, policy=POLICY).rows
    if {row.primitive for row in explained if row.reason == "STRUCTURAL"} - {*small.CALLS}:
        return CONTROL
    rows = [row for row in explained if row.reason != "STRUCTURAL"]
    program = small.plan(fn, *args)[0]
    if [row.primitive for row in rows] != [eqn.primitive.name for eqn in program]:
        return PREPARED
    if not {row.primitive for row in rows} & {*small.PRODUCTS}:
        return NO_PRODUCT
    low = set()
    for row, eqn in zip(rows, program, strict=True):
        low |= {v for v, dtype in zip(eqn.results, row.results, strict=True) if dtype == "bfloat16"}
        read = tuple(name(eqn.dtype if v.is_float else v.dtype) for v in eqn.operands)
        if (read, tuple(name(v.dtype) for v in eqn.results)) != (row.operands, row.results):
            return exception(small, row, eqn, low)
    return None


def exception(small, row, eqn, low):
    if row.primitive in small.PRODUCTS and row.reason in ("SOURCE", "PROMOTE_FULL", "PROMOTE_LOW"):
        return "VECTORS"
    reads = zip(eqn.operands, row.operands, strict=True)
    if row.reason == "PROMOTE_FULL" and any(v in low and dtype == "float32" for v, dtype in reads):
        return "SHARED"
    return row.reason


def test_dtypes_agree_where_no_exception_applies(small, as_users_run_it):
    found = collections.Counter()
    unexplained = []
    for program in chosen():
        with program.context():
            fn, args = program.build()
            arguments = Arguments(args, program.derive)
            why = difference(small, arguments.flat(fn), arguments.arrays())
        found[why] += 1
        if why not in (None, NO_PRODUCT, CONTROL, PREPARED, *EXCEPTIONS):
            unexplained.append(f"{program.name}: {why}")
    assert not unexplained
    assert found[None] >= 200, found
    exceptions = sum(found[why] for why in EXCEPTIONS)
    assert exceptions < found[None] / 4, found


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
