"""NumPyro: densities and bijectors of parameters that a network computes, and whole models."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import transforms
from numpyro.distributions.flows import InverseAutoregressiveTransform
from numpyro.infer import Trace_ELBO
from numpyro.infer.hmc_util import velocity_verlet
from numpyro.infer.util import log_density

from .program import Program, Table

PROGRAMS = Table()


def of_outputs(log_prob, outputs, *shape, **options):
    """A program ``log_prob(x @ w, y)``; all three are differentiated."""

    def build(draw):
        return (
            lambda x, w, y: log_prob(x @ w, y),
            (draw(4, 6), draw(6, outputs, scale=0.5), draw(*shape)),
        )

    return Program(build, **{"grad": (0, 1, 2), **options})


def mixture(h, y):
    weights = dist.Categorical(logits=h[:, :2])
    parts = dist.Normal(h[:, 2:4], jax.nn.softplus(h[:, 4:]))
    return dist.MixtureSameFamily(weights, parts).log_prob(y)


def heavy_tails(h, y):
    scale = jax.nn.softplus(h[:, 1])
    return dist.StudentT(3.0 + scale, h[:, 0], scale).log_prob(y)


def on_simplex(h, y):
    return dist.Dirichlet(jax.nn.softplus(h) + 0.5).log_prob(jax.nn.softmax(y))


def skewed(h, y):
    y = jax.nn.softplus(y) + 0.1
    a, b = jax.nn.softplus(h[:, 0]) + 0.5, jax.nn.softplus(h[:, 1]) + 0.5
    return [kind(a, b).log_prob(y) for kind in (dist.Gamma, dist.Weibull, dist.LogNormal)]


def counts(h, y):
    counted = jnp.array([0, 3, 1, 5])
    rate = jnp.exp(h[:, 0] + y)
    return (
        dist.Poisson(rate).log_prob(counted),
        dist.ZeroInflatedPoisson(jax.nn.sigmoid(h[:, 1]), rate).log_prob(counted),
        dist.NegativeBinomial2(rate, 2.0).log_prob(counted),
    )


def low_rank_gaussian(h, y):
    return dist.LowRankMultivariateNormal(
        h[:, :6], h[:, 6:].reshape(4, 6, 2), jnp.full((4, 6), 0.5)
    ).log_prob(y)


def correlations(h, y):
    corr = transforms.CorrCholeskyTransform()(jnp.tanh(h[0]))
    return dist.LKJCholesky(5, 2.0).log_prob(corr), corr @ y


def ordered(h, y):
    cutpoints = transforms.OrderedTransform()(y)
    return dist.OrderedLogistic(h[:, 0], cutpoints).log_prob(jnp.array([0, 2, 1, 3]))


def circular(h, y):
    return dist.VonMises(jnp.tanh(h[:, 0]), jax.nn.softplus(h[:, 1]) + 0.5).log_prob(jnp.tanh(y))


PROGRAMS |= {
    "mixture of normals": of_outputs(mixture, 6, 4),
    "student": of_outputs(heavy_tails, 2, 4),
    "dirichlet": of_outputs(on_simplex, 3, 4, 3),
    "gamma, weibull, lognormal": of_outputs(skewed, 2, 4),
    "counts": of_outputs(counts, 2, 4),
    "low-rank normal": of_outputs(low_rank_gaussian, 18, 4, 6),
    "correlation matrices": of_outputs(correlations, 10, 5, 2),
    "ordered logistic": of_outputs(ordered, 1, 3),
    "von mises": of_outputs(circular, 2, 4),
}


@PROGRAMS.add()
def logistic_regression(draw):
    """The log density of a hierarchical model, through NumPyro's effect handlers."""

    def model(x, y):
        scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
        w = numpyro.sample("w", dist.Normal(jnp.zeros((5, 3)), scale).to_event(2))
        bias = numpyro.sample("bias", dist.StudentT(3.0, jnp.zeros(3), 1.0).to_event(1))
        with numpyro.plate("data", 6):
            numpyro.sample("y", dist.Categorical(logits=x @ w + bias), obs=y)

    def density(params, x, y):
        return log_density(model, (x, y), {}, params)[0]

    params = {"scale": draw.positive(), "w": draw(5, 3), "bias": draw(3)}
    return density, (params, draw(6, 5), draw.integers(3, 6))


@PROGRAMS.add(grad=(0, 1))
def evidence_lower_bound(draw):
    """A stochastic bound of a factor model, with a full-rank normal guide."""

    def model(w, y):
        z = numpyro.sample("z", dist.Normal(jnp.zeros((4, 5)), 1.0).to_event(2))
        numpyro.sample("y", dist.Normal(jnp.tanh(z @ w), 0.5).to_event(2), obs=y)

    def guide(params, w, y):
        loc = jnp.tanh(y @ params["w"])
        scale = jax.nn.softplus(params["scale"])
        numpyro.sample("z", dist.Normal(loc, scale).to_event(2))

    def bound(params, w, y, key):
        guided = lambda w, y: guide(params, w, y)
        return Trace_ELBO(2).loss(key, {}, model, guided, w, y)

    params = {"w": draw(6, 5), "scale": draw(4, 5)}
    return bound, (params, draw(5, 6), draw(4, 6), jax.random.key(1))


@PROGRAMS.add(grad=(0, 1))
def autoregressive_flow(draw):
    """An inverse autoregressive flow: masked dense layers, and its Jacobian."""

    def network(x, params):
        mask = jnp.tril(jnp.ones((6, 6)), -1)
        return jnp.tanh(x @ (params["w"] * mask.T)), jnp.tanh(x @ (params["v"] * mask.T))

    def density(params, z):
        arn = lambda x: network(x, params)
        flow = InverseAutoregressiveTransform(arn)
        x = flow(z)
        return x, flow.log_abs_det_jacobian(z, x)

    return density, ({"w": draw(6, 6, scale=0.5), "v": draw(6, 6, scale=0.5)}, draw(4, 6))


@PROGRAMS.add(grad=(0, 1))
def hamiltonian_trajectory(draw):
    """Leapfrog steps under the potential of a neural model."""

    def run(w, z):
        potential = lambda z: jnp.sum(jnp.tanh(z @ w) ** 2) + 0.5 * jnp.sum(z**2)
        kinetic = lambda mass, r: 0.5 * jnp.sum(mass * r**2)
        init, update = velocity_verlet(potential, kinetic)
        state = init(z, jnp.ones_like(z), jnp.zeros_like(z))
        for _ in range(3):
            state = update(0.2, jnp.ones_like(z), state)
        return state.z, state.r, state.potential_energy

    return run, (draw(6, 5), draw(2, 6))
