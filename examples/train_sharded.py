"""Trains the GPT of `train_char_transformer` on many devices, and in many processes.

The devices form a mesh of two axes. Each batch is split over both (data parallel). The matrices
are split over the second, with the optimizer's state for them, and gathered where they are used
(FSDP): what travels then is 16 bits, while gradients are added in float32. Run it on all devices of
this machine, here on eight that a CPU pretends to have::

    JAX_NUM_CPU_DEVICES=8 python examples/train_sharded.py
    JAX_NUM_CPU_DEVICES=8 python examples/train_sharded.py --fsdp 2    # 4 copies of 2 parts

or in several processes, on one or more machines that share a file system::

    two="--output run --coordinator HOST:1234 --num-processes 2"
    python examples/train_sharded.py $two --process-id 0
    python examples/train_sharded.py $two --process-id 1

It prints and draws what `train_char_transformer` does, and the numbers are the same up to the order
in which devices add: compare with it, and with ``--dtype float32``.

If a process dies, the others end with an error: start all of them again with `--resume`. Loss
scaling needs nothing here: a gradient that overflows on one device skips the step on all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from char_gpt import Gpt, batch_at, batches_in_order, load_text, make_loss
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from rich.console import Console
from runs import low_share
from train_char_transformer import (
    Result,
    State,
    check,
    checkpoints,
    make_parser,
    make_update,
    progress_bar,
    restore,
    save,
    save_curve,
    show,
)

from jmp_autocast import autocast, scaled_value_and_grad, skipped_steps

AXES = ("data", "fsdp")


# --- shardings ------------------------------------------------------------------------------


def make_mesh(parts: int) -> Mesh:
    """Returns a mesh of all devices of all processes, in which neighbors hold one copy."""
    copies, rest = divmod(jax.device_count(), parts)
    if rest:
        sys.exit(f"--fsdp {parts} does not divide {jax.device_count()} devices.")
    return jax.make_mesh((copies, parts), AXES, axis_types=(AxisType.Auto,) * 2)


def sharding_of(leaf: Any, mesh: Mesh) -> NamedSharding:
    """Returns how an array of the state lies: a matrix is split along its longest axis that fits.

    Moments have the shapes of their parameters, so they are split alike.
    """
    fits = [size if size % mesh.shape["fsdp"] == 0 else 0 for size in leaf.shape]
    if leaf.ndim < 2 or not any(fits):
        return NamedSharding(mesh, P())
    axis = int(np.argmax(fits))
    return NamedSharding(mesh, P(*(None,) * axis, "fsdp"))


def place(windows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Returns a batch of which each device holds its rows."""
    sharding = NamedSharding(mesh, P(AXES))
    return jax.make_array_from_callback(windows.shape, sharding, lambda index: windows[index])


LossFn = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]


def gathering(loss_fn: LossFn, mesh: Mesh) -> LossFn:
    """Returns the loss of parameters of which each device holds a part, and gathers the rest.

    Under `autocast` a part is cast before it travels.
    """

    def loss(params: Any, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = jax.lax.with_sharding_constraint(params, NamedSharding(mesh, P()))
        return loss_fn(whole, windows)

    return loss


# --- training -------------------------------------------------------------------------------


def train(options: argparse.Namespace, mesh: Mesh, console: Console) -> Result:
    """Trains on a mesh, from the last checkpoint in ``options.output`` or from scratch."""
    if options.batch_size % mesh.size:
        sys.exit(f"--batch-size must be a multiple of the number of devices, {mesh.size}.")
    text = load_text()
    model = Gpt(text.vocabulary, options.layers, options.width, options.heads)
    loss_fn = gathering(make_loss(model, options.loss_weight), mesh)
    if options.dtype != "float32":
        loss_fn = autocast(loss_fn, options.dtype)
    optimizer, update = make_update(loss_fn, options)

    def initial() -> State:
        tokens = jnp.zeros((options.batch_size, options.context), jnp.int32)
        params = model.init(jax.random.key(options.seed), tokens)["params"]
        return State(params, optimizer.init(params), *jnp.zeros((2, options.steps)))

    shardings = jax.tree.map(lambda leaf: sharding_of(leaf, mesh), jax.eval_shape(initial))
    state = jax.jit(initial, out_shardings=shardings)()
    update = jax.jit(update, out_shardings=shardings)

    # Each process computes the whole batch and hands its devices their rows.
    size = (options.batch_size, options.context)
    with checkpoints(options.output) as manager, progress_bar(console) as progress:
        state, first = restore(manager, state, options)
        task = progress.add_task(options.dtype, total=options.steps, completed=first)
        for step in range(first, options.steps):
            windows = batch_at(text.train, *size, options.seed, step)
            state = update(state, step, place(windows, mesh))
            done = step + 1
            if done % options.checkpoint_every == 0 or done == options.steps:
                save(manager, done, state, options)
            if done % options.log_every == 0 or done == options.steps:
                loss, scale = (np.asarray(x)[step] for x in (state.losses, state.scales))
                console.print(f"step {done:4d}  loss {loss:.4f}  scale {scale:,.0f}")
            progress.advance(task)

    whole = NamedSharding(mesh, P())
    loss_of = jax.jit(lambda params, windows: loss_fn(params, windows)[1], out_shardings=whole)
    batches = batches_in_order(text.validation, *size)
    losses = [float(loss_of(state.params, place(batch, mesh))) for batch in batches]
    gradient = scaled_value_and_grad(loss_fn, has_aux=True)
    return Result(
        dtype=options.dtype,
        loss_scaling=options.loss_scaling,
        train_loss=float(np.mean(np.asarray(state.losses)[-max(1, options.steps // 10) :])),
        validation_loss=float(np.mean(losses)),
        unigram_entropy=text.entropy(),
        low_flops=low_share(gradient, state.opt_state, state.params, batches[0]),
        skipped_steps=int(skipped_steps(state.opt_state)),
        losses=state.losses.tolist(),
        scales=state.scales.tolist(),
    )


# --- processes ------------------------------------------------------------------------------


def connect(options: argparse.Namespace) -> None:
    """Joins the other processes; must come before anything else that uses devices.

    A process that hears nothing of another for the time-out ends with an error, and so does one
    whose collective operation breaks off.
    """
    if options.num_processes > 1:
        # Ignored where the devices are no CPUs.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            options.coordinator,
            options.num_processes,
            options.process_id,
            initialization_timeout=options.timeout,
            heartbeat_timeout_seconds=options.timeout,
            shutdown_timeout_seconds=options.timeout,
        )


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Returns the options of the run, and those that say on which devices it runs."""
    parser = make_parser(__doc__)
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--fsdp", type=int, default=0, help="how many devices share one copy; 0: all of them"
    )
    group.add_argument("--coordinator", help="HOST:PORT of process 0, reachable from all")
    group.add_argument("--num-processes", type=int, default=1, help="how many there are")
    group.add_argument("--process-id", type=int, default=0, help="which of them this is, from 0")
    group.add_argument(
        "--timeout", type=int, default=60, help="seconds to wait for another process"
    )
    options = parser.parse_args(argv)
    names = ("fsdp", "coordinator", "num_processes", "process_id", "timeout")
    devices = argparse.Namespace(**{name: vars(options).pop(name) for name in names})
    if devices.fsdp < 0:
        parser.error("--fsdp must be at least 0")
    if not 0 <= devices.process_id < devices.num_processes:
        parser.error("--process-id must be less than --num-processes")
    if devices.num_processes > 1 and not (devices.coordinator and options.output):
        parser.error("several processes need a --coordinator and a shared --output")
    check(parser, options)
    return options, devices


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains as the command line asks for.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        The result, which process 0 also writes to ``result.json``.
    """
    options, devices = parse(argv)
    connect(devices)
    console = Console(quiet=jax.process_index() > 0)
    mesh = make_mesh(devices.fsdp or jax.device_count())
    console.print(f"{mesh.size} devices in {jax.process_count()} processes: {dict(mesh.shape)}")
    result = train(options, mesh, console)
    if jax.process_index() == 0:
        save_curve(result, options.output / "curve.png")
        text = json.dumps(dataclasses.asdict(result), indent=1)
        (options.output / "result.json").write_text(text)
        show(result, console)
        console.print(f"Checkpoints, curve.png and result.json: {options.output}", soft_wrap=True)
    return result


if __name__ == "__main__":
    main()
