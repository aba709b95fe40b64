"""Programs with one fault each, in the line that ends in ``# fault``."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

F32 = np.float32


def planted_line(function):
    """``file:line`` of the line of a function's source that is marked."""
    function = inspect.unwrap(function)
    lines, start = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if line.rstrip().endswith("# fault"))
    return f"{inspect.getsourcefile(function)}:{start + offset}:"


# --- straight-line code -----------------------------------------------------------------------


def log_of_zero(p):
    with jax.named_scope("head"), jax.named_scope("entropy"):
        q = p / jnp.sum(p)
        logs = jnp.log(q)  # fault
        return -jnp.sum(q * logs)


def division_by_zero(x):
    norm = jnp.sqrt(jnp.sum(x * x))
    unit = x[0] / norm  # fault
    return jnp.tanh(unit) + x


def root_of_a_negative_number(x):
    y = x - 2.0
    return jnp.sqrt(y) + 1.0  # fault


def fully_masked_softmax(x):
    mask = jnp.zeros(3, bool)
    scores = jnp.where(mask, x, -jnp.inf)
    return jax.nn.softmax(scores)  # fault


def in_complex_numbers(x):
    z = lax.complex(x, x)
    return jnp.abs(1.0 / z)  # fault


def into_float8(x):
    small = (x * 300.0).astype(jnp.float8_e4m3fn)  # fault
    return small.astype(jnp.float32)


def jit_in_jit(x):
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.log1p(-x)  # fault

    @jax.jit
    def outer(x):
        with jax.named_scope("outer"):
            return inner(x) * 2.0

    return outer(x)


def mapped(x):
    def row(x):
        return jnp.log(x)  # fault

    return jax.vmap(row)(x[:, None])


def two_faults(x):
    first = jnp.exp(x * 100.0)  # fault
    return first, jnp.log(x - x)


# --- loops and branches -----------------------------------------------------------------------


def overflow_in_a_scan(params, x):
    def layer(h, w):
        with jax.named_scope("layer"):
            return h @ w, None  # fault

    with jax.named_scope("stack"):
        return jnp.sum(lax.scan(layer, x, params["w"])[0])


def later_iteration(x):
    def step(total, y):
        y = y + 1.0
        with jax.named_scope("step"):
            return total + 1.0 / (y - 4.0), y  # fault

    return lax.scan(step, x[0], jnp.arange(6.0))


def reversed_scan(x):
    def step(total, y):
        return total + jnp.log(y), None  # fault

    return lax.scan(step, x[0], jnp.arange(6.0), reverse=True)


def in_while(x):
    def body(state):
        i, y = state
        return i + 1, y * 1e9  # fault

    return lax.while_loop(lambda state: state[0] < 7, body, (0, x))


def in_the_condition_of_while(x):
    def goes_on(y):
        return jnp.log(y[0]) > -9.0  # fault

    return lax.while_loop(goes_on, lambda y: y - 1.0, x + 2.0)


def in_the_branch_taken(x):
    def logarithm(x):
        with jax.named_scope("taken"):
            return jnp.log(x)  # fault

    branches = [lambda x: 1.0 / (x - x), logarithm, lambda x: jnp.sqrt(-1.0 - x)]
    return lax.switch(jnp.int32(jnp.sum(x) * 0.0) + 1, branches, x)


def in_nested_loops(x):
    def inner(j, y):
        return y + 1.0 / (y - 5.0)  # fault

    def outer(i, y):
        y = lax.fori_loop(0, 3, inner, i.astype(jnp.float32))
        return lax.cond(i > 4, lambda y: y + 1.0, lambda y: y, y)

    return lax.fori_loop(0, 7, outer, x[0])


# --- backward passes --------------------------------------------------------------------------


def root_at_zero(x):
    with jax.named_scope("norm"):
        return jnp.sum(jnp.sqrt(x))  # fault


def norm_at_zero(x):
    return jnp.linalg.norm(x - x)  # fault


def overflow_backwards(x):
    low = jnp.sin(x).astype(jnp.float16)
    with jax.named_scope("loss"):
        return 1e6 * jnp.sum(low.astype(jnp.float32))  # fault


def masked_ratio(x):
    with jax.named_scope("ratio"):
        y = jnp.maximum(x, 1e-30)
        return jnp.sum(jnp.where(x > 0, 1.0 / y, 0.0) ** 0.5)  # fault


def in_a_checkpoint(x):
    @jax.checkpoint
    def block(x):
        return jnp.sum(jnp.sqrt(jnp.abs(x)))  # fault

    return block(jnp.sin(x))


def in_a_scan_backwards(x):
    def step(y, scale):
        return jnp.sqrt(y * scale), None  # fault

    return jnp.sum(lax.scan(step, x[1:2], jnp.array([1.0, 2.0, 0.0]))[0])


@jax.custom_jvp
def ruled_forward(x):
    return jnp.log(x)


@ruled_forward.defjvp
def ruled_forward_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.log(x + 1.0), dx / x  # fault


@jax.custom_vjp
def ruled_backward(x):
    return jnp.sqrt(x)


def ruled_backward_fwd(x):
    return jnp.sqrt(x), x


def ruled_backward_bwd(x, cotangent):
    with jax.named_scope("rule"):
        return (cotangent / x,)


ruled_backward.defvjp(ruled_backward_fwd, ruled_backward_bwd)


def with_a_ruled_backward(x):
    return jnp.sum(ruled_backward(x))  # fault


def custom_jvp_itself(x):
    @jax.custom_jvp
    def f(x):
        return jnp.log(x)  # fault

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f(x)


def custom_vjp_itself(x):
    @jax.custom_vjp
    def f(x):
        return jnp.log(x)  # fault

    f.defvjp(lambda x: (f(x), None), lambda _, cotangent: (cotangent,))
    return f(x)


# --- devices and modules ----------------------------------------------------------------------

DEVICES = 8


def on_devices(function, out, check_vma=True):
    """A function of one array whose rows are on the devices."""
    rows = PartitionSpec("devices")

    def sharded(x):
        mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": rows, "out_specs": rows if out == "rows" else PartitionSpec()}
        return jax.shard_map(function, mesh=mesh, check_vma=check_vma, **specs)(x)

    return sharded


def on_one_device(x):
    y = x + 1.0
    return jnp.log(y)  # fault


def before_a_sum_over_devices(x):
    logs = jnp.log(x)  # fault
    return lax.psum(logs, "devices")


def by_a_sum_over_devices(x):
    total = lax.psum(x * 1e38, "devices")  # fault
    return total * 0.0


def in_a_loop_on_devices(x):
    def step(y, _):
        total = lax.psum(y, "devices") / 8.0
        return y - 1.0 / (total - 3.0), None  # fault

    return lax.scan(step, x, None, length=3)[0]


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.log(nn.Dense(2, use_bias=False)(x))  # fault


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        return Head(name="head")(x * 0.0)


def net(x):
    variables = Net().init(jax.random.key(0), jnp.ones((1, 3)))
    return Net().apply(variables, x)
