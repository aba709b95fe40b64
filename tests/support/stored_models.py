"""Forward passes of the models of the benchmarks and of the examples, with parameters to store.

Their folders are on the path while `tests.support.scripts.run_from` holds them there.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmp_autocast import Policy, autocast, cast_params
from jmp_autocast.backend import EVERY_ROUNDING


class Program(NamedTuple):
    """A forward pass.

    Attributes:
        fn: From parameters and other arguments to what inference returns.
        params: The parameters.
        args: The other arguments.
    """

    fn: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]


def of_case(case: Any) -> Callable[[], Program]:
    """Returns what makes the program of a model of the benchmarks."""

    from comparison.cases import forward

    def make() -> Program:
        model = case.build()
        params, batch = case.examples(1)[0]
        return Program(lambda params, batch: forward(model, params, batch)[0], params, (batch,))

    return make


def images() -> np.ndarray:
    """Returns eight images like those of scikit-learn's digits."""
    return np.random.default_rng(0).standard_normal((8, 8, 8, 1)).astype(np.float32)


def char_gpt() -> Program:
    """The GPT of `train_char_transformer` and of what imports its model."""
    import char_gpt

    model = char_gpt.Gpt(vocabulary=103, layers=1, width=64, heads=4)
    tokens = np.random.default_rng(0).integers(0, 103, (4, 32))
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    return Program(lambda p, tokens: model.apply({"params": p}, tokens), variables["params"],
                   (tokens,))  # fmt: skip


def train_digits() -> Program:
    """The CNN of `train_digits` and `export_classifier`."""
    import train_digits

    params = jax.jit(train_digits.Cnn().init)(jax.random.key(0), images())["params"]
    predict = lambda p, x: jax.nn.softmax(train_digits.Cnn().apply({"params": p}, x))
    return Program(predict, params, (images(),))


def train_haiku_resnet() -> Program:
    """The ResNet, in evaluation mode."""
    import train_haiku_resnet

    model = train_haiku_resnet.make_model(channels=4, blocks=2)
    init = jax.jit(model.init, static_argnames="train")
    params, state = init(jax.random.key(0), images(), train=True)
    return Program(lambda p, s, x: model.apply(p, s, x, train=False)[0], params, (state, images()))


def train_neural_ode() -> Program:
    """The vector field, solved from eight points."""
    import equinox as eqx
    import train_neural_ode

    field = eqx.filter_jit(train_neural_ode.Field)(32, jax.random.key(0))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    solve = lambda p, y: train_neural_ode.solve(eqx.combine(p, static), y)
    fn = lambda p, y: jax.vmap(lambda y: solve(p, y))(y)
    return Program(fn, params, (images()[0, :, :2, 0],))


def train_nnx() -> Program:
    """The convolutional network, in evaluation mode."""
    import train_nnx

    net = train_nnx.ConvNet(nnx.Rngs(0))
    net.eval()
    graph, params, others = nnx.split(net, nnx.Param, ...)
    return Program(lambda p, x: nnx.merge(graph, p, others)(x), params, (images(),))


def fused_attention() -> Program:
    """The stack of attention layers."""
    import fused_attention

    params = fused_attention.make_params(jax.random.key(0), layers=2, width=32)
    x = np.random.default_rng(0).standard_normal((2, 8, 32)).astype(np.float32)
    return Program(fused_attention.make_loss(4), params, (x, x))


def loss_scaling_linen() -> Program:
    """The small network with BatchNorm."""
    import loss_scaling_linen

    model, x = loss_scaling_linen.Network(), images()[0, :, :2, 0]
    init = jax.jit(model.init, static_argnames="train")
    variables = dict(init(jax.random.key(0), x, train=False))
    params = variables.pop("params")
    apply = lambda p, x: model.apply({"params": p, **variables}, x, train=False)
    return Program(apply, params, (x,))


def loss_scaling_nnx() -> Program:
    """The small network without a norm."""
    import loss_scaling_nnx

    graph, params = nnx.split(loss_scaling_nnx.Network(nnx.Rngs(0)))
    return Program(lambda p, x: nnx.merge(graph, p)(x), params, (images()[0, :, :2, 0],))


def tune_policy() -> Program:
    """The blocks, one of which has large activations."""
    import tune_policy

    params = tune_policy.init(jax.random.key(0), 2, 32)
    return Program(tune_policy.make_loss(1), params, tune_policy.batch_of(jax.random.key(1), 8))


EXAMPLES = (char_gpt, train_digits, train_haiku_resnet, train_neural_ode, train_nnx,
            fused_attention, loss_scaling_linen, loss_scaling_nnx, tune_policy)  # fmt: skip


def programs(size: str) -> dict[str, Callable[[], Program]]:
    """Returns what makes each program, by name."""
    from comparison.cases import SIZES

    return {case.name: of_case(case) for case in SIZES[size]} | {f.__name__: f for f in EXAMPLES}


def shaken(params: Any) -> Any:
    """Returns parameters of which none is 0 or 1: those are the same number in 16 bits."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + np.float32(0.1) * rng.standard_normal(x.shape, np.float32), params
    )


def needless(program: Program, policy: Policy) -> Iterator[str]:
    """Yields the names of leaves that are in 16 bits by hand alone, and need not be in float32.

    The program returns the same bits where such a leaf is rounded.
    """
    wrapper = autocast(program.fn, policy=policy)
    run = jax.jit(wrapper, compiler_options=EVERY_ROUNDING)
    exact = jax.tree.leaves(run(program.params, *program.args))
    stored = jax.tree.leaves(cast_params(wrapper, program.params, *program.args))
    paths, structure = jax.tree_util.tree_flatten_with_path(program.params)
    for i, (path, _) in enumerate(paths):
        if stored[i].dtype == jnp.float32 and "norm" not in jax.tree_util.keystr(path).lower():
            leaves = [leaf for _, leaf in paths]
            leaves[i] = jnp.float32(jnp.asarray(leaves[i], policy.compute_dtype))
            found = jax.tree.leaves(run(structure.unflatten(leaves), *program.args))
            if all(np.array_equal(a, b) for a, b in zip(exact, found, strict=True)):
                yield jax.tree_util.keystr(path, simple=True, separator="/")
