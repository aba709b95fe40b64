"""jax.scipy, jnp.fft, jax.nn, jax.image, jax.ops and what else comes with JAX."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax.experimental import sparse

from .program import Program, Table

PROGRAMS = Table()


def of_arrays(fn, *shapes, **options):
    """A program of random arrays of these shapes; all are differentiated."""

    def build(draw):
        return fn, tuple(draw(*shape) for shape in shapes)

    return Program(build, **{"grad": tuple(range(len(shapes))), **options})


# --- jax.scipy ------------------------------------------------------------------------------


def incomplete_functions(x, w):
    y = jax.nn.sigmoid(x @ w)
    return jsp.special.betainc(2.0, 3.0, y), jsp.special.gammainc(1.5, 2 * y)


def short_time(x, w):
    return jnp.log(jnp.abs(jsp.signal.stft(x @ w, nperseg=8)[2]) ** 2 + 0.1)


def sampled(x, w, points):
    where = [jax.nn.sigmoid(points) * 3, jax.nn.sigmoid(-points) * 3]
    return jsp.ndimage.map_coordinates(x @ w, where, order=1, mode="nearest")


PROGRAMS |= {
    "incomplete functions": of_arrays(incomplete_functions, (2, 6), (6, 4)),
    "signal convolution": of_arrays(
        lambda x, k: (jsp.signal.convolve2d(x, k), jsp.signal.fftconvolve(x, k, mode="same")),
        (6, 6),
        (3, 3),
    ),
    "short-time fourier": of_arrays(short_time, (2, 6), (6, 32)),
    "map coordinates": of_arrays(sampled, (4, 6), (6, 5), (7,)),
}

# --- jax.numpy ------------------------------------------------------------------------------


def spectral_layer(x, real, imaginary):
    """A layer of a Fourier neural operator."""
    modes = jnp.fft.rfft(x, axis=1)[:, :3]
    mixed = jnp.einsum("bkc,kcd->bkd", modes, jax.lax.complex(real, imaginary))
    return x + jax.nn.gelu(jnp.fft.irfft(mixed, x.shape[1], axis=1)) @ real[0]


def long_convolution(x, decay, w):
    """A convolution by FFT with a kernel as long as the sequence, as of state space models."""
    kernel = jnp.exp(-jnp.exp(decay) * jnp.arange(x.shape[1])[:, None])
    n = 2 * x.shape[1]
    y = jnp.fft.irfft(jnp.fft.rfft(x, n, 1) * jnp.fft.rfft(kernel, n, 0), n, 1)[:, : n // 2]
    return jax.nn.silu(y) @ w


PROGRAMS |= {
    "spectral layer": of_arrays(spectral_layer, (2, 8, 6), (3, 6, 6), (3, 6, 6)),
    "long convolution": of_arrays(long_convolution, (2, 8, 6), (6,), (6, 2)),
}

# --- jax.nn, jax.image, jax.ops, sparse arrays, random samples --------------------------------


def grouped_attention(q, k, v):
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=jnp.array([2, 4]), local_window_size=2
    )


def message_passing(nodes, weight, edges):
    senders, receivers = jnp.array([0, 1, 2, 3, 0]), jnp.array([1, 2, 3, 0, 2])
    messages = jax.nn.silu(nodes[senders] @ weight + edges)
    total = jax.ops.segment_sum(messages, receivers, 4)
    return total, jax.ops.segment_max(messages, receivers, 4)


def resized(x, w):
    y = jax.image.resize(x @ w, (2, 7, 7, 2), "bicubic")
    return jax.image.scale_and_translate(
        y, (2, 4, 4, 2), (1, 2), jnp.array([0.6, 0.5]), jnp.array([0.1, 0.0]), "lanczos3"
    )


def sparse_product(x, w):
    mask = jnp.arange(20).reshape(4, 5) % 3 == 0
    matrix = sparse.BCOO.fromdense(jnp.where(mask, 1.0, 0.0), nse=7)
    matrix = sparse.BCOO((matrix.data * x[:7], matrix.indices), shape=matrix.shape)
    return jnp.tanh(matrix @ w) @ w.T


PROGRAMS |= {
    "grouped query attention": of_arrays(
        grouped_attention, (2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)
    ),
    "graph messages": of_arrays(message_passing, (4, 6), (6, 6), (5, 6)),
    "image resize": of_arrays(resized, (2, 4, 4, 6), (6, 2)),
    "sparse product": of_arrays(sparse_product, (8,), (5, 6)),
}
