"""optax: losses of a linear model's outputs, and projections."""

import jax
import jax.numpy as jnp
import optax

from .program import Program, Table

PROGRAMS = Table()
LABELS = jnp.array([0, 2, 1, 2])
ONE_HOT = jax.nn.one_hot(LABELS, 3)
SIGNS = 2 * ONE_HOT - 1


def of_logits(loss, **options):
    """A program ``loss(x @ w)``; weights and inputs are differentiated."""

    def build(draw):
        return lambda w, x: loss(x @ w), (draw(5, 3), draw(4, 5))

    return Program(build, **{"grad": (0, 1), **options})


def contrastive(z):
    return optax.ntxent(z, jnp.array([0, 1, 0, 1]), temperature=0.5)


def triplet(z):
    return optax.losses.triplet_margin_loss(z[:1], z[1:2], z[2:3], margin=20.0)


def hessian_of_loss(z):
    return jax.hessian(lambda z: optax.softmax_cross_entropy(z, ONE_HOT).mean())(z)


LOSSES = {
    "poly": lambda z: optax.losses.poly_loss_cross_entropy(z, ONE_HOT, epsilon=1.5),
    "binary sparsemax": lambda z: optax.losses.sparsemax_loss(z, ONE_HOT),
    "generalized kl": lambda z: optax.losses.generalized_kl_divergence(z, ONE_HOT + 0.1),
    "hinge": lambda z: optax.losses.multiclass_hinge_loss(z, LABELS),
    "triplet": triplet,
    "contrastive": contrastive,
    "ranking": lambda z: optax.losses.ranking_softmax_loss(z, SIGNS),
    "fenchel-young": lambda z: optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)(z, ONE_HOT),
    "dice": lambda z: optax.losses.dice_loss(z, ONE_HOT),
    "hessian of a loss": hessian_of_loss,
    "simplex projection": lambda z: jax.vmap(optax.projections.projection_simplex)(z),
    "ball projection": lambda z: optax.projections.projection_l2_ball(z, 1.5),
}
PROGRAMS |= {name: of_logits(loss) for name, loss in LOSSES.items()}
