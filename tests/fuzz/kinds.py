"""Programs of the kinds that 16 bits got wrong, each with its arrays and its bound.

The product ``p`` of `dangers` is exact here: `x` holds numbers of 8 bits, and `w` is the identity.
So whoever casts by hand, and keeps in float32 what the kind says, has the digits of float32, and
the bound is a few units in the last place of the dtype. Requests have the digits of float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

N, D = 16, 8
Arrays = Callable[[np.random.Generator], np.ndarray]

# 8 units in the last place of bfloat16; what a derivative adds up of float16 is off by more.
BOUND = 8 * 2.0**-9
LIKE_FLOAT32 = 1e-5


def _levels(rng: np.random.Generator) -> np.ndarray:
    """Eight numbers in a row, some of whose sigmoids are one number in 16 bits."""
    first = rng.integers(160, 224, (N, 1)) / 32  # 5 to 7
    steps = np.stack([rng.permutation(D) for _ in range(N)])
    return first + steps / 32


def _nearly_dependent(rng: np.random.Generator) -> np.ndarray:
    """Columns that differ by at most 1/16: the Gram matrix has a condition number of 1e4."""
    return (rng.integers(40, 120, (N, 1)) + rng.integers(-2, 3, (N, D))) / 64


def normal(mean: float = 0.0, deviation: float = 1.0, shape: Any = (N, D)) -> Arrays:
    """Returns what draws float32 numbers of all digits."""
    return lambda rng: mean + deviation * rng.normal(size=shape)


_NEAR_ONE: Arrays = lambda rng: 1 + rng.integers(-16, 17, (N, D)) / 128
_LARGE: Arrays = lambda rng: rng.integers(75, 255, (N, D)) * 8.0  # 600 to 2,040
_TENS: Arrays = lambda rng: rng.integers(96, 112, (N, D)) / 8  # 12 to 14
_UNITS: Arrays = lambda rng: rng.integers(-64, 65, (N, D)) / 32


class Kind(NamedTuple):
    """Programs of one kind.

    Args:
        results: Expressions, separated by white space.
        lines: Statements before them.
        x: The first operand of the product; numbers of 8 bits.
        y: The second array.
        v: A parameter.
        dtypes: In which it went wrong.
        gradients: The gradients are compared, and not the values.
        bound: What a result may be off by, relative to its largest element.
        head: The first line of the program, and the order of its arguments.
    """

    results: str
    lines: tuple[str, ...] = ()
    x: Arrays = _UNITS
    y: Arrays = normal()
    v: Arrays = normal()
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    gradients: bool = False
    bound: float = BOUND
    heads: tuple[tuple[str, str], ...] = (("params, x, y, i", "params x y i"),)


_TREES = (
    ("a, b, x", "y params x"),
    ("b, a, x", "params y x"),
    ("x, a, b", "x y params"),
    ("batch, params, x", "y params x"),
    ("obs, policy, x", "y params x"),
)
_DECOMPOSED = (
    "gram = lambda a: jnp.einsum('ni,nj->ij', a, a) if N > D else a",
    "E = 1e-3 * jnp.eye(D)",
    "v = params['v'][:D]",
)

KINDS: Mapping[str, Kind] = {
    "derivatives": Kind(
        """
        p/(jnp.abs(p)+1) p[:,::-1]/p jax.nn.gelu(p) jnp.tanh(p**3) jnp.tanh(lax.integer_pow(p,4))
        100*jnp.arctan2(p,p+100) jnp.cbrt(p) (p+1)/(3+p)
        jnp.divide(x,p) p*(1/(1+p)) (p[:,:4]/p[:,4:]) jnp.arctan2(p[:,:1],p) p/p[:,:1]
        """,
        x=_LARGE,
        dtypes=("float16",),
        gradients=True,
        bound=0.05,
    ),
    "roots": Kind(
        """
        jnp.sqrt(p*p) jnp.sqrt(jnp.square(p)+p[:,::-1]**2) jnp.cbrt(p*p)
        jax.jit(lambda p:jnp.sqrt(p*p))(p) jnp.sqrt(2*jnp.square(p/3))
        lax.scan(lambda c,r:(c,jnp.sqrt(r*r+r*r)),0,p)[1] jnp.sqrt(lax.integer_pow(p,2)+p*p)
        """,
        x=lambda rng: rng.integers(8, 64, (N, D)) * 2.0**-19,  # 1.5e-5 to 1.2e-4
        dtypes=("float16",),
        gradients=True,
        bound=0.05,
    ),
    "exponentials": Kind(
        """
        (jnp.exp(p)@v)/jnp.exp(p).sum(-1,keepdims=True) (e@v)/(e@jnp.ones((D,1)))
        jnp.einsum('nd,de->ne',e,v)/e.sum(1)[:,None]
        jnp.exp2(p*1.4)@v/jnp.exp2(p*1.4).sum(1)[:,None]
        jnp.log(e@jnp.abs(v)) (e/e.sum(-1,keepdims=True))@v
        mean(jnp.exp(p-v[0])) mean(jnp.exp(30*(p-p.mean(-1,keepdims=True)))) mean(jnp.exp(p-p[0]/4))
        mean(jnp.exp(30*(p-p.min(-1,keepdims=True)))) mean(jnp.exp(jnp.where(i>0,p,-1e9))+1)
        lax.scan(lambda c,r:(jnp.exp(r),c@v),e[0],p)[1]/1e6 mean(jax.nn.softmax(p))
        lax.scan(lambda c,r:(c+jnp.exp(r),c@v),e[0],p)[1]/1e6 mean(jnp.exp(p-p.max(-1)[:,None]))
        """,
        lines=(
            "v, e = params['v'][:D], jnp.exp(p)",
            "mean = lambda a: (a @ v) / a.sum(-1, keepdims=True)",
        ),
        x=_TENS,
        dtypes=("float16",),
    ),
    "factors": Kind(
        """
        over(0.998+0.001*jnp.tanh(p)) over(jax.nn.hard_sigmoid(0.02*p+2.96)) over(jnp.sqrt(1-g))
        over(jnp.clip(0.995+0.001*p,0.9,0.999)) over(0.998+0.001*p/(1+jnp.abs(p))) over(1-0.01*s)
        over(0.99+(1-0.99)*s) over(jnp.exp(-0.01*jax.nn.softplus(p))) over(jax.nn.sigmoid(p/4+6))
        over(1-g,jax.checkpoint(gated)) over(1-g,jax.jit(gated)) over(1-g,written)
        over(jax.jit(jax.nn.sigmoid)(p/4+6)) jnp.cumprod(many(1-g),0) over(jnp.maximum(1-g,0.9))
        """,
        lines=(
            "s = jax.nn.sigmoid(p)",
            "g = 0.01 * s",
            "many = lambda z: jnp.tile(z, (16, 1))",
            "gated = lambda h, now: (now[0] * h + (1 - now[0]) * now[1], None)",
            "written = lambda h, now: (h + (1 - now[0]) * (now[1] - h), None)",
            "over = lambda a, f=gated: lax.scan(f, jnp.zeros(D), (many(a), many(p)))[0]",
        ),
    ),
    "ranked": Kind(
        """
        lax.top_k(s,3)[1] jnp.argmax(jnp.tanh(p/2),-1) jnp.argsort(-s,axis=-1) jnp.argmin(-2*s,-1)
        s[:,:,None]>s[:,None] jnp.sum(jax.vmap(lambda r:r[:,None]<r)(jnp.tanh(p/2)),-1)
        lax.sort((jnp.tanh(p/2),jnp.broadcast_to(jnp.arange(D),p.shape)),num_keys=1)[1]
        jnp.argsort(jnp.argsort(s,axis=1),axis=1) jnp.argmax(s,-1)*(jnp.sum(s@w)>-1) s<s[:,::-1]
        jnp.argmax(1-s,-1) lax.top_k(s.T,2)[1] jnp.argmax(jax.scipy.special.erf(p/4),-1)
        lax.top_k(s+params['v'][0]*0,3)[1] jnp.argsort(s.reshape(-1,4),axis=1)
        """,
        lines=("s = jax.nn.sigmoid(p)",),
        x=_levels,
    ),
    "calls": Kind(
        """
        lax.top_k(jax.jit(jax.nn.sigmoid)(p),3)[1] jnp.argmax(jax.checkpoint(jnp.tanh)(p/2),-1)
        jnp.argsort(lax.scan(lambda c,r:(c,jax.nn.sigmoid(r)),0,p)[1],axis=-1)
        jax.jit(lambda s:jnp.argmax(s,-1))(jax.jit(lambda p:jax.nn.sigmoid(2*p/2))(p))
        jnp.argmin(jax.vmap(lambda r:-jax.nn.sigmoid(r))(p),-1)
        lax.top_k(jax.jit(jax.checkpoint(jax.nn.sigmoid))(p),3)[1]
        lax.cond(x[0,0]>0,jax.nn.sigmoid,jnp.tanh,p).argsort(-1)
        """,
        x=_levels,
    ),
    "rounds": Kind(
        """
        over(argmax,sg) over(argmax,th) over(order,sg) over(lambda s,_:lax.top_k(s,3)[1],th)
        over(lambda s,h:s[:,None]<sg(h),sg) over(lambda s,_:jnp.log(1-s),sg) over(minus,sg)
        over(lambda s,_:jnp.arctanh(s),th) over(lambda s,_:jnp.cumprod(jnp.tile(s,40)),sg)
        over(jax.checkpoint(order),jax.jit(sg)) over(order,sg,counted) over(minus,sg,counted)
        over(lambda s,_:jnp.log(s),lambda h:1-th(h),counted) jax.jit(lambda q:over(argmax,sg))(p)
        """,
        lines=(
            "sg, th = jax.nn.sigmoid, lambda h: jnp.tanh(h / 2)",
            "argmax, order = lambda s, _: jnp.argmax(s), lambda s, _: jnp.argsort(-s)",
            "minus = lambda s, h: (1 - s) * h",
            "scanned = lambda step, c: lax.scan(step, c, p)[1]",
            "def counted(step, c):",
            "    def body(k, z): n, e = step(z[0], p[k]); return n, z[1].at[k].set(e)",
            "    return lax.fori_loop(0, N, body, (c, jnp.stack([step(c, p[0])[1]] * N)))[1]",
            "over = lambda a, make, f=scanned: f(lambda s, h: (make(h), a(s, h)), make(p[0]))",
        ),
        x=_levels,
    ),
    "distances": Kind(
        """
        jnp.argmin(jnp.sum(jnp.square(q),-1)-2*p@q.T,-1) dist(p,q) jnp.exp(-9*dist(p,q))
        jnp.argmax(jnp.einsum('nd,kd->nk',p,q)-0.5*jnp.einsum('kd,kd->k',q,q),-1)
        jnp.min(jnp.sum(p**2,1,keepdims=True)-2*jnp.matmul(p,q.T)+jnp.sum(q**2,1),-1)
        jax.vmap(lambda a:jax.vmap(lambda b:jnp.dot(a,a)-2*jnp.dot(a,b)+jnp.dot(b,b))(q))(p)
        norm(p)[:,None]+norm(q)-2*jnp.einsum('id,jd->ij',p,q) jax.jit(dist)(p,q).min(0)
        jnp.sqrt(jnp.maximum(dist(p,q),1e-9)) jax.checkpoint(dist)(p,q).argmin(1)
        lax.scan(lambda n,a:(n,dist(a,q)),0,p.reshape(2,8,8))[1] jnp.tensordot(p*p,ones,1)-2*p@q.T
        jnp.diagonal(gram)[:,None]+jnp.diagonal(gram)-2*gram
        """,
        lines=(
            "q, ones, gram = params['v'], jnp.ones((D, N)), p @ p.T",
            "norm = lambda a: jnp.linalg.norm(a, axis=-1) ** 2",
            "dist = lambda a, b: (a*a).sum(-1)[:, None] + (b*b).sum(-1) + (-2. * a) @ b.T",
        ),
        x=_NEAR_ONE,
        v=_NEAR_ONE,
    ),
    "variances": Kind(
        """
        conv(p[:,0]**2)-conv(p[:,0])**2 jnp.maximum(conv(p[:,1]*p[:,1])-jnp.square(conv(p[:,1])),0)
        (p*p)@B-(p@B)**2 conv(p[:,0]*p[:,1])-conv(p[:,0])*conv(p[:,1])
        jnp.sqrt(jnp.abs(jnp.square(p)@B-jnp.square(p@B))+1e-5)
        """,
        lines=(
            "B = jnp.ones((D, D)) / D",
            "conv = lambda a: jnp.convolve(a, jnp.ones(8) / 8, 'valid')",
        ),
        x=_NEAR_ONE,
    ),
    "stencils": Kind(
        """
        jnp.convolve(y[:,0],np.array([1,-4,6,-4,1],'float32'),'valid') RING@y CENTER@y y.T@RING
        jnp.einsum('ij,jd->id',RING,y) STEP@y jax.jit(lambda y:RING@y)(y) jnp.matmul(RING,y)*p
        lax.conv_general_dilated(y[None,:,:,None],LAPLACE,(1,1),'VALID',dimension_numbers=NHWC)
        """,
        lines=(
            "one = np.eye(N, dtype='float32')",
            "RING = np.roll(one, 1, 0) + np.roll(one, -1, 0) - 2 * one",
            "CENTER, STEP = one - np.float32(1 / N), (np.eye(N, k=1) - one)[:-1].astype('float32')",
            "LAPLACE = np.array([[0,1,0],[1,-4,1],[0,1,0]], 'float32')[:, :, None, None]",
            "NHWC = ('NHWC', 'HWIO', 'NHWC')",
        ),
        y=normal(3, 0.05),
    ),
    "decompositions": Kind(
        """
        jnp.linalg.solve(gram(p)+E,p.T@y[:,0]) jnp.linalg.inv(gram(p)+E) jnp.linalg.inv(p.T@p+E)
        jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(gram(p)+E),y[0])
        jnp.log(jnp.diagonal(jnp.linalg.cholesky(gram(p)+E))) jnp.linalg.slogdet(gram(p)+E)[1]
        1/jnp.sqrt(jnp.linalg.eigh(gram(p)/N+E)[0]) jnp.linalg.svd(gram(p)+E,compute_uv=False)[-3:]
        jnp.linalg.inv(jax.jit(gram)(p)+E) jnp.linalg.cholesky(p@p.T+jnp.eye(N)/99)
        lax.fori_loop(0,2,lambda _,c:c-jnp.linalg.solve(gram(p)+E,c),y[0])
        jnp.linalg.solve(jax.checkpoint(gram)(p)+E,y[0]) jnp.linalg.qr(gram(p)+E)[1][-1:]
        """,
        lines=_DECOMPOSED,
        x=_nearly_dependent,
    ),
    "chains": Kind(
        """
        jnp.linalg.inv(p.T@y@y.T@p/N+E) jnp.linalg.cholesky(v@gram(p)@v.T+E)
        jnp.linalg.slogdet(v@(p.T@p)@v.T+E)[1] jnp.linalg.inv(p.T@(y@y.T)@p+E)
        jnp.linalg.solve(v@gram(p)@v.T+E,y[0])
        """,
        lines=_DECOMPOSED,
        x=_nearly_dependent,
    ),
    "few": Kind(
        """
        a@r-a[:1]@r jnp.einsum('ij,nj->ni',r,a)-r@a[0] jax.vmap(lambda q:r@q)(a)-jnp.dot(r,a[0])
        jnp.tensordot(a,r,1)-jnp.tensordot(a[0],r,1) jnp.linalg.norm(a@r-(a+0.1)@r,axis=-1)
        (b@h.T)[1:]-(b@h.T)[:1] jnp.diff(jnp.matmul(a.reshape(4,4,3),r.T),axis=1) jnp.sin(a@r)
        jax.jit(jnp.matmul)(a,r)-a[:1]@r (a@r)[:,None]-(a@r)[None]
        jnp.diff(jnp.convolve(y[:,0],jnp.abs(params['v'][0,:3]),'valid'))
        """,
        lines=(
            "a, r, h = y[:, :3], params['v'][:3, :3], params['v'][:4, :4]",
            "b = jnp.concatenate([a, jnp.ones((N, 1))], 1)",
        ),
        y=normal(50, 1),
    ),
    "ramps": Kind(
        """
        jnp.sin(np.linspace(0,1,N*D,dtype='float32').reshape(N,D)@f)*p jnp.cos(LINE@f+p)
        jnp.sin(jnp.cumsum(jnp.ones((N,D)),0)/N@f)*p jnp.sin(GRID@f/N)
        jnp.sin(jnp.linspace(-1,1,N*D).reshape(N,D)@f) jnp.sin((jnp.arange(N*D)/99).reshape(N,D)@f)
        jnp.sin(((jnp.arange(N*D)//4).astype('float32')/32).reshape(N,D)@f)
        jnp.sin(jnp.stack(jnp.meshgrid(jnp.arange(8.)/8,jnp.arange(8.)/8)).reshape(N,D)@f)
        jnp.sin(jnp.convolve(jnp.arange(128.)/128,f[:,0],'valid'))
        jnp.sin(jnp.einsum('nd,de->en',LINE,f)) jax.jit(lambda f:jnp.sin(LINE@f))(f)
        """,
        lines=(
            "f, GRID = 40 * params['v'][:D], np.mgrid[:N, :D][0].astype('float32')",
            "LINE = jnp.asarray(np.linspace(0, 1, N * D, dtype='float32').reshape(N, D))",
        ),
    ),
    "requests": Kind(
        """
        jnp.matmul(y,v.T,precision='highest') jnp.dot(y,v.T,precision=lax.Precision.HIGH)
        jnp.einsum('nd,kd->nk',y,v,precision='high') asked(lambda:y@v.T)
        asked(lambda:jax.jit(dot)(y))
        lax.dot_general(y,v,(((1,),(1,)),((),())),precision=('highest','default'))
        lax.dot(y,v.T,precision='highest') jnp.convolve(y[:,0],v[:,0],precision='highest')
        lax.dot(y,v.T,precision=lax.DotAlgorithmPreset.F32_F32_F32)
        jnp.tensordot(y,v,((1,),(1,)),precision='float32') jnp.vdot(y,v,precision='highest')
        """,
        lines=(
            "v = params['v']",
            "dot = lambda y: y @ v.T",
            "def asked(f):",
            "    with jax.default_matmul_precision('highest'): return f()",
        ),
        bound=LIKE_FLOAT32,
    ),
    "contexts": Kind(
        """
        wide(lambda:(f64(y)@f64(v).T).astype('float32')) wide(lambda:far(f64(y)).astype('float32'))
        wide(lambda:(f64(y)*f64(y)-f64(y[:1])**2).sum(1).astype('float32'))
        jax.jit(lambda y:wide(lambda:far(f64(y)).astype('float32')))(y)
        lax.scan(lambda c,r:(c,wide(lambda:far(f64(r)).astype('float32'))),0,y)[1]
        jax.checkpoint(lambda y:wide(lambda:far(f64(y)).astype('float32')))(y)
        """,
        lines=(
            "v, f64 = params['v'], lambda a: a.astype('float64')",
            "far = lambda a: (a + 1e9) - 1e9",
            "def wide(f):",
            "    with jax.enable_x64(True): return f()",
        ),
        bound=LIKE_FLOAT32,
    ),
    # A reader in float32 or a difference would raise the sum, whatever is taken for a parameter: a
    # product ends it.
    "arguments": Kind(
        "(s+-s[:1])@w jnp.tanh(s+-s[::-1])@w (jnp.maximum(s,0)+-s[1])@w (s[1:]+-s[:-1])@w",
        lines=("s = p + DATA['m']",),
        y=normal(300, 1, (D,)),
        heads=_TREES,
    ),
}  # fmt: skip


def rows(kind: str) -> list[str]:
    """Returns the expressions of a kind."""
    return re.split(r"(?<!lambda)\s+", KINDS[kind].results.strip())


def arrays(name: str, order: str, rng: np.random.Generator) -> tuple[Any, ...]:
    """Draws the arguments of a program of a kind, in the order of its head."""
    kind = KINDS[name]
    draw = lambda of: np.asarray(of(rng), np.float32)
    params = {"w": np.eye(D, dtype=np.float32), "v": draw(kind.v)}
    of_data = draw(kind.y)
    if name == "arguments":
        # The name of a key decides nothing against what a product reads.
        params, of_data = {"w": params["w"], "input": params["v"][0]}, {"m": of_data}
    integers = np.asarray(rng.integers(0, 3, (N, D)), np.int32)
    found = {"params": params, "x": draw(kind.x), "y": of_data, "i": integers}
    return tuple(found[key] for key in order.split())
