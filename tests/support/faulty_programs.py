"""Programs with one fault each, in the line that ends in ``# fault``."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jmp_autocast import FP16, autocast

F32 = np.float32
X = np.array([1.0, 0.0, 4.0], F32)
LARGE = {"w": np.full((4, 8, 8), 3.0, F32)}
ONES = np.ones((2, 8), F32)
EIGHT = np.arange(8, dtype=F32)


class Fault(NamedTuple):
    """A program, and what the report of `check_numerics` has to say of its fault.

    The function's source holds the marked line. ``made`` are the numbers of NaNs and of infinities
    over all runs, ``run`` the first run that makes one, of how many.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    primitive: str
    made: tuple[int, int]
    scope: str = ""
    inside: tuple[str, ...] = ()
    run: tuple[int, int] = (0, 1)
    backward: bool = False
    checked: Callable[..., Any] | None = None


FAULTS: list[Fault] = []


def faulty(primitive, made, *args, of=None, **told):
    """Registers a program of `X` or of other arguments; what is checked is ``of`` it."""

    def register(function):
        checked = of and of(function)
        FAULTS.append(Fault(function, args or (X,), primitive, made, checked=checked, **told))
        return function

    return register


def planted_line(function):
    """``file:line`` of the line of a function's source that is marked."""
    function = inspect.unwrap(function)
    lines, start = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if line.rstrip().endswith("# fault"))
    return f"{inspect.getsourcefile(function)}:{start + offset}:"


# --- straight-line code -----------------------------------------------------------------------


@faulty("log", (0, 1), scope="head/entropy")
def log_of_zero(p):
    with jax.named_scope("head"), jax.named_scope("entropy"):
        q = p / jnp.sum(p)
        logs = jnp.log(q)  # fault
        return -jnp.sum(q * logs)


@faulty("sub", (3, 0))
def fully_masked_softmax(x):
    mask = jnp.zeros(3, bool)
    scores = jnp.where(mask, x, -jnp.inf)
    return jax.nn.softmax(scores)  # fault


@faulty("div", (1, 1))
def in_complex_numbers(x):
    z = lax.complex(x, x)
    return jnp.abs(1.0 / z)  # fault


@faulty("convert_element_type", (1, 0))
def into_float8(x):
    small = (x * 300.0).astype(jnp.float8_e4m3fn)  # fault
    return small.astype(jnp.float32)


# --- loops and branches -----------------------------------------------------------------------


@faulty(
    "dot_general",
    (0, 16),
    LARGE,
    ONES,
    scope="stack/layer",
    inside=("scan",),
    run=(3, 4),
    of=functools.partial(autocast, policy=FP16),
)
def overflow_in_a_scan(params, x):
    def layer(h, w):
        with jax.named_scope("layer"):
            return h @ w, None  # fault

    with jax.named_scope("stack"):
        return jnp.sum(lax.scan(layer, x, params["w"])[0])


@faulty("div", (0, 1), scope="step", inside=("scan",), run=(3, 6))
def later_iteration(x):
    def step(total, y):
        y = y + 1.0
        with jax.named_scope("step"):
            return total + 1.0 / (y - 4.0), y  # fault

    return lax.scan(step, x[0], jnp.arange(6.0))


@faulty("mul", (0, 6), inside=("while",), run=(4, 7))
def in_while(x):
    def body(state):
        i, y = state
        return i + 1, y * 1e9  # fault

    return lax.while_loop(lambda state: state[0] < 7, body, (0, x))


@faulty("log", (0, 1), inside=("while",), run=(3, 4))
def in_the_condition_of_while(x):
    def goes_on(y):
        return jnp.log(y[0]) > -9.0  # fault

    return lax.while_loop(goes_on, lambda y: y - 1.0, x + 2.0)


@faulty("log", (0, 1), scope="taken", inside=("cond",))
def in_the_branch_taken(x):
    def logarithm(x):
        with jax.named_scope("taken"):
            return jnp.log(x)  # fault

    branches = [lambda x: 1.0 / (x - x), logarithm, lambda x: jnp.sqrt(-1.0 - x)]
    return lax.switch(jnp.int32(jnp.sum(x) * 0.0) + 1, branches, x)


# --- backward passes --------------------------------------------------------------------------


@faulty("div", (0, 1), scope="norm", of=jax.grad)
def root_at_zero(x):
    with jax.named_scope("norm"):
        return jnp.sum(jnp.sqrt(x))  # fault


@faulty("convert_element_type", (0, 3), scope="loss", backward=True, of=jax.grad)
def overflow_backwards(x):
    low = jnp.sin(x).astype(jnp.float16)
    with jax.named_scope("loss"):
        return 1e6 * jnp.sum(low.astype(jnp.float32))  # fault


@faulty("div", (0, 1), scope="rematted_computation", backward=True, of=jax.grad)
def in_a_checkpoint(x):
    @jax.checkpoint
    def block(x):
        return jnp.sum(jnp.sqrt(jnp.abs(x)))  # fault

    return block(jnp.sin(x))


@jax.custom_vjp
def ruled_backward(x):
    return jnp.sqrt(x)


def ruled_backward_fwd(x):
    return jnp.sqrt(x), x


def ruled_backward_bwd(x, cotangent):
    with jax.named_scope("rule"):
        return (cotangent / x,)


ruled_backward.defvjp(ruled_backward_fwd, ruled_backward_bwd)


@faulty("div", (0, 1), scope="rule", backward=True, of=jax.grad)
def with_a_ruled_backward(x):
    return jnp.sum(ruled_backward(x))  # fault


# --- devices ----------------------------------------------------------------------

DEVICES = 8


def on_devices(function, out, check_vma=True):
    """A function of one array whose rows are on the devices."""
    rows = PartitionSpec("devices")

    def sharded(x):
        mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": rows, "out_specs": rows if out == "rows" else PartitionSpec()}
        return jax.shard_map(function, mesh=mesh, check_vma=check_vma, **specs)(x)

    return sharded


def on_devices_faulty(primitive, made, x, out="rows", inside=(), run=(0, DEVICES)):
    """Registers a function on devices, with and without a check of what varies over them."""

    def register(function):
        for vma, name in zip((True, False), np.broadcast_to(primitive, 2).tolist(), strict=True):
            of = functools.partial(on_devices, out=out, check_vma=vma)
            faulty(name, made, x, inside=("shard_map", *inside), run=run, of=of)(function)
        return function

    return register


@on_devices_faulty("log", (3, 1), EIGHT - 4.0)
def on_one_device(x):
    y = x + 1.0
    return jnp.log(y)  # fault


@on_devices_faulty(("psum_invariant", "psum"), (0, 8), EIGHT * 0.0 + 1.0, out="all")
def by_a_sum_over_devices(x):
    total = lax.psum(x * 1e38, "devices")  # fault
    return total * 0.0


@on_devices_faulty("div", (0, 8), EIGHT * 0.0 + 4.0, inside=("scan",), run=(1, 24))
def in_a_loop_on_devices(x):
    def step(y, _):
        total = lax.psum(y, "devices") / 8.0
        return y - 1.0 / (total - 3.0), None  # fault

    return lax.scan(step, x, None, length=3)[0]
