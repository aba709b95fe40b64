"""Programs with one fault each, in the line that ends in ``# fault``, for `check_numerics`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jmp_autocast import FP16, autocast

F32 = np.float32


class Fault(NamedTuple):
    """A program, and what its report has to say of its fault.

    Args:
        function: The function; its source holds the marked line.
        args: The arguments.
        primitive: The primitive that makes the first bad value.
        made: What it makes: the numbers of NaNs and of infinities, over all runs.
        scope: The scope.
        inside: The loops, branches and device maps around it.
        run: The run that is the first to make it, of how many.
        backward: It stands in a backward pass.
        checked: What is checked, where that is not the function itself.
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


# --- the table --------------------------------------------------------------------------------

X = np.array([1.0, 0.0, 4.0], F32)
LARGE = {"w": np.full((4, 8, 8), 3.0, F32)}
ONES = np.ones((2, 8), F32)
EIGHT = np.arange(8, dtype=F32)
SHARDED = ("shard_map",)


def over(function, **options):
    return on_devices(function, **options)


FAULTS = [
    Fault(log_of_zero, (X,), "log", (0, 1), "head/entropy"),
    Fault(division_by_zero, (X - X,), "div", (1, 0)),
    Fault(root_of_a_negative_number, (X,), "sqrt", (2, 0)),
    Fault(fully_masked_softmax, (X,), "sub", (3, 0)),
    Fault(in_complex_numbers, (X,), "div", (1, 1)),
    Fault(into_float8, (X,), "convert_element_type", (1, 0)),
    Fault(jit_in_jit, (X,), "log1p", (1, 1), "outer/inner"),
    Fault(mapped, (X,), "log", (0, 1)),
    Fault(two_faults, (X,), "exp", (0, 2)),
    Fault(
        overflow_in_a_scan,
        (LARGE, ONES),
        "dot_general",
        (0, 16),
        "stack/layer",
        ("scan",),
        (3, 4),
        checked=autocast(overflow_in_a_scan, policy=FP16),
    ),
    Fault(later_iteration, (X,), "div", (0, 1), "step", ("scan",), (3, 6)),
    Fault(reversed_scan, (X,), "log", (0, 1), "", ("scan",), (5, 6)),
    Fault(in_while, (X,), "mul", (0, 6), "", ("while",), (4, 7)),
    Fault(in_the_condition_of_while, (X,), "log", (0, 1), "", ("while",), (3, 4)),
    Fault(in_the_branch_taken, (X,), "log", (0, 1), "taken", ("cond",)),
    Fault(in_nested_loops, (X,), "div", (0, 1), "", ("scan", "scan"), (15, 21)),
    Fault(root_at_zero, (X,), "div", (0, 1), "norm", checked=jax.grad(root_at_zero)),
    Fault(norm_at_zero, (X,), "div", (0, 1), checked=jax.grad(norm_at_zero)),
    Fault(
        overflow_backwards,
        (X,),
        "convert_element_type",
        (0, 3),
        "loss",
        backward=True,
        checked=jax.grad(overflow_backwards),
    ),
    Fault(masked_ratio, (X - X,), "integer_pow", (0, 3), "ratio", checked=jax.grad(masked_ratio)),
    Fault(
        in_a_checkpoint,
        (X,),
        "div",
        (0, 1),
        "rematted_computation",
        backward=True,
        checked=jax.grad(in_a_checkpoint),
    ),
    Fault(
        in_a_scan_backwards,
        (X + 1.0,),
        "div",
        (0, 1),
        "",
        ("scan",),
        (2, 3),
        checked=jax.grad(in_a_scan_backwards),
    ),
    Fault(
        ruled_forward_jvp,
        (X,),
        "div",
        (0, 1),
        checked=lambda x: jax.jvp(ruled_forward, (x,), (jnp.ones_like(x),))[1],
    ),
    Fault(
        with_a_ruled_backward,
        (X,),
        "div",
        (0, 1),
        "rule",
        backward=True,
        checked=jax.grad(with_a_ruled_backward),
    ),
    Fault(custom_jvp_itself, (X,), "log", (0, 1)),
    Fault(custom_vjp_itself, (X,), "log", (0, 1)),
    Fault(Head.__call__, (np.ones((1, 3), F32),), "log", (0, 2), "Net/head", checked=net),
]
for vma in (True, False):
    FAULTS += [
        Fault(
            on_one_device,
            (EIGHT - 4.0,),
            "log",
            (3, 1),
            "",
            SHARDED,
            (0, 8),
            checked=over(on_one_device, out="rows", check_vma=vma),
        ),
        Fault(
            before_a_sum_over_devices,
            (EIGHT,),
            "log",
            (0, 1),
            "",
            SHARDED,
            (0, 8),
            checked=over(before_a_sum_over_devices, out="all", check_vma=vma),
        ),
        Fault(
            by_a_sum_over_devices,
            (EIGHT * 0.0 + 1.0,),
            "psum_invariant" if vma else "psum",
            (0, 8),
            "",
            SHARDED,
            (0, 8),
            checked=over(by_a_sum_over_devices, out="all", check_vma=vma),
        ),
        Fault(
            in_a_loop_on_devices,
            (EIGHT * 0.0 + 4.0,),
            "div",
            (0, 8),
            "",
            (*SHARDED, "scan"),
            (1, 24),
            checked=over(in_a_loop_on_devices, out="rows", check_vma=vma),
        ),
    ]
