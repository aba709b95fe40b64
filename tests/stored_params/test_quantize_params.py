"""`quantize_params`: which leaves are stored in 8 bits, and that products stay what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jmp_autocast import BF16, Float8, Policy, autocast, cast_params, explain
from jmp_autocast.optimizers import as_float32
from jmp_autocast.quantize_params import QuantizedArray, quantize_params
from tests.support.jaxprs import find, trace
from tests.support.numerics import normal
from tests.support.stored_params import assert_same_results

FP8 = Policy(jnp.bfloat16, matmul=Float8(minimum=16, skip=(), emulate=True))
K, M = 32, 16
A = normal(0, x=(M, K), w=(K, K), b=(K,), stack=(3, K, K), deep=(2, 3, K, K), wide=(K, 2 * K))
PARAMS = {name: array for name, array in A.items() if name != "x"}
E4M3 = jnp.dtype("float8_e4m3fn")

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def layer(h, w):
    return jnp.tanh(h @ w), None


def over_layers(p, x):
    return lax.scan(layer, x, p["stack"])[0]


def over_layers_of_layers(p, x):
    return lax.scan(lambda h, ws: (lax.scan(layer, h, ws)[0], None), x, p["deep"])[0]


def through_calls(p, x):
    step = jax.checkpoint(lambda h, w: jax.jit(layer)(h, w.T))
    x = lax.scan(step, x, p["stack"])[0]
    return lax.cond(x[0, 0] > 9, lambda w: x @ w, lambda w: x @ w.T, p["w"])


def in_loops(p, x):
    x = lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ p["w"]), x)
    return lax.while_loop(lambda h: h[0, 0] > 9, lambda h: h @ p["w"], x)


def shared_by_devices(p, x):
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P("d"), P(None, "d")), "out_specs": P()}
    return jax.shard_map(lambda w, x: lax.psum(x @ w, "d"), mesh=mesh, **specs)(p["w"], x)


# A program, and the shape of the scales of each leaf that is stored in 8 bits.
PROGRAMS = {
    "a bias stays": (lambda p, x: x @ p["w"] + p["b"], {"w": ()}),
    "moved": (lambda p, x: x @ p["w"].T.reshape(K, K), {"w": ()}),
    "in three dimensions": (
        lambda p, x: jnp.einsum("bd,dhk->bhk", x, p["wide"].reshape(K, 2, K)),
        {"wide": ()},
    ),
    "over layers": (over_layers, {"stack": (3,)}),
    "over layers of layers": (over_layers_of_layers, {"deep": (2, 3)}),
    "through calls": (through_calls, {"stack": (3,), "w": ()}),
    "in loops": (in_loops, {"w": ()}),
    "experts": (
        lambda p, x: jnp.einsum("nd,edf->enf", x, p["stack"]),
        {"stack": ()},
    ),
    # What stays in float32.
    "tied": (lambda p, x: x @ p["w"].T + p["w"][jnp.arange(M)], {}),
    "a part": (lambda p, x: x @ p["wide"][:, :K] + x @ p["wide"][:, K:], {}),
    "one layer of a stack": (lambda p, x: x @ p["stack"][1], {}),
    "in two ways": (
        lambda p, x: over_layers(p, x) + jnp.einsum("nd,edf->nf", x, p["stack"]),
        {},
    ),
    "another dimension scanned": (
        lambda p, x: lax.scan(layer, x, p["wide"].reshape(K, 2, K).swapaxes(0, 1))[0],
        {},
    ),
    "scaled": (lambda p, x: x @ (p["w"] * 0.5), {}),
    "shards": (shared_by_devices, {}),
    "returned": (lambda p, x: (x @ p["w"], p["w"]), {}),
}


def stored(tree):
    is_leaf = lambda x: isinstance(x, QuantizedArray)
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(k, simple=True): x for k, x in found if is_leaf(x)}


def weights_quantized(fn, *args):
    """How many arrays of the size of a weight are quantized in a program."""
    casts = find(trace(fn, *args), "convert_element_type")
    return sum(e.outvars[0].aval.dtype == E4M3 and e.invars[0].aval.size >= K * K for e in casts)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_stored_and_that_the_program_returns_the_same_bits(name):
    fn, scales = PROGRAMS[name]
    low, x = autocast(fn, policy=FP8, params=0), A["x"]
    if not scales:
        with pytest.warns(UserWarning, match="stored no parameter"):
            assert not stored(quantize_params(low, PARAMS, x))
        return
    small = quantize_params(low, PARAMS, x)
    found = stored(small)
    assert {k: v.scale.shape for k, v in found.items()} == scales
    assert {v.values.dtype for v in found.values()} == {E4M3}
    assert [found[k].shape for k in found] == [PARAMS[k].shape for k in found]
    np.testing.assert_array_equal(jax.jit(low)(small, x), jax.jit(low)(PARAMS, x))
    assert weights_quantized(low, small, x) == 0
    assert weights_quantized(low, PARAMS, x) > 0


def decoded(p, x):
    """A decoder's step: an embedding, products of layers and a head, for a batch of any size."""
    h = x + p["b"]
    h = lax.scan(layer, h, p["stack"])[0] / jnp.sum(jnp.exp(p["gate"]))
    return h @ p["wide"]


DECODER = PARAMS | normal(1, gate=(K,))
LOW = autocast(decoded, policy=FP8, params=0)


def assert_same_trees(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_of_any_size_is_served_from_what_is_stored(batch):
    expected = quantize_params(LOW, DECODER, A["x"])
    small = quantize_params(LOW, DECODER, A["x"][:batch])
    assert set(stored(small)) == {"stack", "wide"}
    assert_same_trees(small, expected)
    (shape,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((shape, K), jnp.float32)
    assert jax.tree.structure(quantize_params(LOW, DECODER, x)) == jax.tree.structure(small)
    # The products are those of a batch in which the others are zeros: nothing is rounded anew.
    padded = jnp.zeros_like(A["x"]).at[:batch].set(A["x"][:batch])
    tokens = (jax.jit(LOW)(p, x)[:batch] for p, x in ((small, A["x"][:batch]), (DECODER, padded)))
    close = {"rtol": 2**-6, "atol": 2**-6}  # a scale is that of the batch's largest number
    np.testing.assert_allclose(*tokens, **close)
    assert weights_quantized(LOW, small, A["x"][:batch]) == 0


@pytest.mark.parametrize("batch", [16, 1])
def test_the_rest_is_stored_in_16_bits_before_or_after(batch):
    args = (A["x"][:batch],)
    after = cast_params(LOW, quantize_params(LOW, DECODER, *args), *args)
    before = quantize_params(LOW, cast_params(LOW, DECODER, *args), *args)
    assert_same_trees(after, before)
    if batch == 16:
        assert_same_results(LOW, after, DECODER, *args)
    assert (after["b"].dtype, after["gate"].dtype) == (jnp.float32, jnp.float32)
    # What quantize_params leaves in float32 is cast: `k` is read in parts.
    low = autocast(lambda p, x: decoded(p, x) + x @ p["k"][:, :1], policy=FP8, params=0)
    params = DECODER | {"k": A["w"]}
    tree = cast_params(low, quantize_params(low, params, *args), *args)
    assert tree["k"].dtype == jnp.bfloat16
    if batch == 16:
        assert_same_results(low, tree, params, *args)


def test_a_checkpoint_in_16_bits_is_quantized():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), DECODER)
    small = quantize_params(LOW, half, A["x"])
    assert_same_results(LOW, small, half, A["x"])
    assert set(stored(small)) == {"stack", "wide"}
    assert small["b"] is half["b"]
    assert_same_trees(
        small,
        quantize_params(LOW, as_float32(half), A["x"])
        | {name: x for name, x in half.items() if name not in ("stack", "wide")},
    )


NOTHING = {
    "minimum": (decoded, Float8(emulate=True), "N=32 is below the minimum, 1024. Float8\\(minimum"),
    "last": (
        lambda p, x: x @ p["w"],
        Float8(minimum=16, emulate=True),
        "no other matrix product follows. Float8\\(skip=\\(\\)\\) takes",
    ),
    "no parameter": (
        lambda p, x: x @ x.T,
        FP8.matmul,
        "no operand is a parameter. Write autocast\\(fn, params=0\\)",
    ),
    "parts": (lambda p, x: x @ p["wide"][:, :K], FP8.matmul, "its products share their weights"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_where_nothing_is_stored_the_warning_says_why_and_what_to_write(name):
    fn, recipe, message = NOTHING[name]
    policy = Policy(jnp.bfloat16, matmul=recipe)
    with pytest.warns(UserWarning, match=f"stored no parameter of .* in 8 bits: {message}"):
        quantize_params(fn, DECODER, A["x"], policy=policy)


def test_what_is_quantized_already_is_no_reason_to_warn():
    small = quantize_params(LOW, DECODER, A["x"])
    assert_same_trees(quantize_params(LOW, small, A["x"]), small)


def test_a_quarter_of_the_bytes_and_the_numbers_of_the_recipe():
    small = quantize_params(over_layers, PARAMS, A["x"], policy=FP8)["stack"]
    assert small.nbytes == A["stack"].nbytes // 4 + 3 * 4
    largest = np.abs(np.asarray(small.values, np.float32)).max((1, 2))
    assert ((largest > 224 - 1) & (largest <= 448)).all()
    error = np.abs(small.dequantized() - A["stack"])
    assert (
        error <= np.maximum(np.abs(A["stack"]) * 2**-4, small.scale[:, None, None] / 2**10)
    ).all()


def test_other_policies_and_transformations_read_what_is_stored():
    low = autocast(over_layers, policy=FP8, params=0)
    p = {"stack": A["stack"]}
    small, x = quantize_params(low, p, A["x"]), A["x"]
    wide = {"stack": small["stack"].dequantized()}
    for fn in (autocast(over_layers, policy=BF16), autocast(over_layers, enabled=False)):
        np.testing.assert_array_equal(jax.jit(fn)(small, x), jax.jit(fn)(wide, x))
    # Ensembles of models, and gradients by what is trained beside them.
    several = jax.tree.map(lambda *xs: jnp.stack(xs), small, small)
    found = jax.jit(jax.vmap(low, (0, None)))(several, x)
    np.testing.assert_array_equal(found, jnp.stack([jax.jit(low)(small, x)] * 2))
    gradient = lambda p: jax.jit(jax.grad(lambda x: jnp.sum(low(p, x))))(x)
    np.testing.assert_array_equal(gradient(small), gradient(p))
    rows = explain(low, small, x).rows
    assert ("dequantize", "STRUCTURAL") in {(row.primitive, row.reason) for row in rows}


def test_cast_params_leaves_what_is_multiplied_in_8_bits():
    # The 8-bit copy is of the float32 weight: rounded to 16 bits before, it is another.
    fn = lambda p, x: (x @ p["w"]) @ p["w"][:, :8] + x @ p["b"][:, None]
    small = cast_params(fn, PARAMS, A["x"], policy=FP8)
    assert_same_results(autocast(fn, FP8), small, PARAMS, A["x"])
    assert (small["w"].dtype, small["b"].dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: quantize_params(jnp.sin, {}, policy=BF16),
            ValueError,
            'multiplies nothing in 8 bits. Pass policy=Policy\\(jnp.bfloat16, matmul="float8"',
        ),
        (
            lambda: jax.grad(lambda p: autocast(over_layers, policy=FP8)(p, A["x"]).sum())(
                quantize_params(over_layers, {"stack": A["stack"]}, A["x"], policy=FP8)
            ),
            TypeError,
            "A QuantizedArray has no gradient.*pass quantized parameters as another argument",
        ),
    ],
)
def test_wrong_use_says_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()
