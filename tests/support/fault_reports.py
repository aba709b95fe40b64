"""What `check_numerics` has to say of the programs of `faulty_programs.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import FP16, autocast

from .faulty_programs import (
    F32,
    Head,
    before_a_sum_over_devices,
    by_a_sum_over_devices,
    custom_jvp_itself,
    custom_vjp_itself,
    division_by_zero,
    fully_masked_softmax,
    in_a_checkpoint,
    in_a_loop_on_devices,
    in_a_scan_backwards,
    in_complex_numbers,
    in_nested_loops,
    in_the_branch_taken,
    in_the_condition_of_while,
    in_while,
    into_float8,
    jit_in_jit,
    later_iteration,
    log_of_zero,
    mapped,
    masked_ratio,
    net,
    norm_at_zero,
    on_devices,
    on_one_device,
    overflow_backwards,
    overflow_in_a_scan,
    reversed_scan,
    root_at_zero,
    root_of_a_negative_number,
    ruled_forward,
    ruled_forward_jvp,
    two_faults,
    with_a_ruled_backward,
)


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


X = np.array([1.0, 0.0, 4.0], F32)
LARGE = {"w": np.full((4, 8, 8), 3.0, F32)}
ONES = np.ones((2, 8), F32)
EIGHT = np.arange(8, dtype=F32)
SHARDED = ("shard_map",)


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
    Fault(Head.__call__, (ONES[:1, :3],), "log", (0, 2), "Net/head", checked=net),
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
            checked=on_devices(on_one_device, out="rows", check_vma=vma),
        ),
        Fault(
            before_a_sum_over_devices,
            (EIGHT,),
            "log",
            (0, 1),
            "",
            SHARDED,
            (0, 8),
            checked=on_devices(before_a_sum_over_devices, out="all", check_vma=vma),
        ),
        Fault(
            by_a_sum_over_devices,
            (EIGHT * 0.0 + 1.0,),
            "psum_invariant" if vma else "psum",
            (0, 8),
            "",
            SHARDED,
            (0, 8),
            checked=on_devices(by_a_sum_over_devices, out="all", check_vma=vma),
        ),
        Fault(
            in_a_loop_on_devices,
            (EIGHT * 0.0 + 4.0,),
            "div",
            (0, 8),
            "",
            (*SHARDED, "scan"),
            (1, 24),
            checked=on_devices(in_a_loop_on_devices, out="rows", check_vma=vma),
        ),
    ]
