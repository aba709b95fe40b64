"""An NNX trainer: dropout and statistics, in bfloat16 and float16, a checkpoint, and LoRA."""

import pathlib

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jmp_autocast import dynamic_loss_scaling, explain, loss_scale, skipped_steps
from jmp_autocast.integrations.nnx import autocast, train_step


class Net(nnx.Module):
    """A small net, of layers that have state."""

    def __init__(self, rngs):
        self.encoder = nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, images):
        return self.head(self.dropout(nnx.relu(self.norm(self.encoder(images)))))


images = jax.random.normal(jax.random.key(0), (64, 64))
labels = jnp.argmax(images[:, :4], -1)


def loss(net, images, labels):
    logits = net(images)
    accuracy = jnp.mean(logits.argmax(-1) == labels)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, accuracy


# --- float32, and one line for bfloat16 -----------------------------------------------------


def trained(loss):
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        (value, _), grads = nnx.value_and_grad(loss, has_aux=True)(net, images, labels)
        optimizer.update(net, grads)
        return value

    return [step(net, optimizer) for _ in range(10)]


full, low = trained(loss), trained(autocast(loss, jnp.bfloat16))
print("bfloat16 follows float32:", all(abs(a - b) < 0.05 for a, b in zip(full, low, strict=True)))
report = explain(autocast(loss, jnp.bfloat16), Net(nnx.Rngs(0)), images, labels)
print("in 16 bits:", f"{report.totals.low_share:.0%}")

# --- float16, a bad batch, a checkpoint, and the same bits ----------------------------------

half_step = nnx.jit(train_step(autocast(loss, jnp.float16), has_aux=True))


def new():
    net = Net(nnx.Rngs(0))
    tx = dynamic_loss_scaling(optax.adam(1e-2), growth_interval=4)
    return net, nnx.Optimizer(net, tx, wrt=nnx.Param)


net, optimizer = new()
with ocp.CheckpointManager(pathlib.Path("checkpoints").resolve()) as manager:
    for i in range(8):
        half_step(optimizer, net, images * (jnp.inf if i == 2 else 1), labels)
        if i == 4:
            manager.save(i, args=ocp.args.StandardSave(nnx.state((net, optimizer))))
    manager.wait_until_finished()
    again, resumed = new()
    like = nnx.state((again, resumed))
    nnx.update((again, resumed), manager.restore(4, args=ocp.args.StandardRestore(like)))
for _ in range(5, 8):
    half_step(resumed, again, images, labels)
print("skipped:", skipped_steps(optimizer), "scale:", loss_scale(optimizer))
leaves = [jax.tree.leaves(nnx.state(x)) for x in ((net, optimizer), (again, resumed))]
print("same bits:", all(bool((a == b).all()) for a, b in zip(*leaves, strict=True)))

# --- LoRA -----------------------------------------------------------------------------------

net.head = nnx.LoRA(16, 4, 4, base_module=net.head, rngs=nnx.Rngs(1))
before = net.encoder.kernel[...]
adapters = nnx.Optimizer(net, dynamic_loss_scaling(optax.adam(1e-2)), wrt=nnx.LoRAParam)
losses = [half_step(adapters, net, images, labels)[0] for _ in range(4)]
print("the base stays:", bool((net.encoder.kernel[...] == before).all()))
print("the adapters move:", bool((net.head.lora_b[...] != 0).any()))
