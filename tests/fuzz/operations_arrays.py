"""Operations on arrays: shapes, indexing, sorting, contractions, linear algebra, fft, random.

The gamma and Poisson samplers are left out: one takes a second to compile.
"""

from __future__ import annotations

from .generator import INTS, Draw, Generator, NoOperand, operation

SHAPES = """
    {x}.ravel() {x}.T {x}[None] {x}[...,None] jnp.flip({x}) jnp.roll({x},1) jnp.tile({x},2)
    jnp.repeat({x},2,axis=0) jnp.stack([{x},{x}]) jnp.squeeze({x}) jnp.moveaxis({x},0,-1)
    jnp.concatenate([{x},{x}]) jnp.pad({x},1) jnp.pad({x},1,mode="edge") jnp.tril({x}) jnp.diag({x})
    jnp.broadcast_to({x},(2,)+{x}.shape) {x}.reshape(-1,1) jnp.atleast_2d({x}) jnp.split({x},1)[0]
    lax.rev({x},(0,)) jnp.swapaxes({x},0,1) jnp.array_split({x},2)[0] jnp.diff({x},axis=0)
    lax.pad({x},jnp.zeros((),{x}.dtype),[(-1,1,0)]+[(0,0,1)]*({x}.ndim-1)) jnp.zeros_like({x})
    jnp.ones_like({x})+{x} jnp.trace({x}) jnp.expand_dims({x},0) jnp.eye(3,dtype={x}.dtype)
    jnp.concatenate([{x}.ravel(),jnp.zeros(2,{x}.dtype)]) jnp.vstack([{x},{x}]) jnp.rot90({x})
    jnp.meshgrid({x}.ravel()[:2],{x}.ravel()[:3])[0] jnp.unstack({x})[0] jnp.copy({x})
""".split()
INDEXING = """
    {x}[0] {x}[-1] {x}[::-1] {x}[1:] {x}[:1] {x}[...,0] {x}[{i}] {x}[jnp.array([1,0,0])]
    {x}.at[0].set(1.) {x}.at[0].add(1.) {x}.at[-1].multiply(.5) {x}.at[0].max(0.) {x}.at[0].min(.1)
    {x}.at[{i}].add(.5) {x}.at[{i}].set({x}[0]) {x}.at[jnp.array([0,0])].add({x}[:1])
    lax.dynamic_slice_in_dim({x},{i}.ravel()[0],1) lax.dynamic_index_in_dim({x},0,keepdims=False)
    lax.dynamic_update_slice_in_dim({x},{x}[:1]*2,{i}.ravel()[0],0) jnp.take({x},{i},axis=0)
    {x}.at[0].apply(jnp.tanh) {x}.at[:,0].set(0.) jnp.take({x},{i},axis=0,mode="fill")
    jax.ops.segment_sum({x},jnp.zeros({x}.shape[0],jnp.int32),2) lax.slice_in_dim({x},0,1)
    {x}.at[{i}].get(mode="fill",fill_value=0) {x}.at[{x}>0].set(0.) {x}.at[0].divide(3.)
    jax.nn.one_hot({i}.ravel()%3,3)@jnp.ones((3,2)) jax.nn.one_hot({i},4) {x}[jnp.abs({i})%2]
    {x}.at[jnp.array([0,0])].mul(.5) {x}.at[0].subtract(2.) {x}.at[jnp.array([0,0])].add({x}[0])
""".split()
SORTING = """
    jnp.sort({x}) jnp.sort({x},axis=0,descending=True) jnp.argsort({x}) lax.top_k({x},1)[0]
    lax.top_k({x},1)[1] jnp.searchsorted(jnp.sort({x}.ravel()),{x}.ravel()) jnp.argmax({x})
    {x}[jnp.argsort({x}[:,0])] jnp.take_along_axis({x},jnp.argsort({x},-1),-1) jnp.quantile({x},.3)
    jnp.digitize({x},jnp.array([-1.,0.,1.])) jnp.unique({x},size=2) jnp.nonzero({x},size=2)[0]
    jnp.lexsort(({x}.ravel(),{x}.ravel())) jnp.partition({x},0) jnp.cumsum(jnp.sort({x},0),0)
    jnp.bincount(jnp.argsort({x}.ravel()),length=3) lax.approx_max_k({x},1)[0]
""".split()
EINSUMS = """
    ij,jk->ik ij,kj->ik ij,ij->i ij,ij-> ij,j->i bij,bjk->bik bij,jk->bik ij,kl->ijkl bij,bij->b
    ij,jk->ki i,j->ij i,i-> bij,bkj->bik ij,ij->ji bij,bij->bj ij,i->j ijk,jk->i
""".split()
DOTS = """
    {x}@{y} jnp.dot({x},{y}) jnp.matmul({x},{y}.T) jnp.tensordot({x},{y},2) jnp.vdot({x},{x})
    jnp.tensordot({x},{y},1) jnp.outer({x},{y}) jnp.inner({x},{y}) jnp.kron({x},{y}) {x}@{x}.T
    jnp.matmul({x},{x}.T,precision="highest") jnp.dot({x},{y},preferred_element_type=jnp.float32)
    lax.dot({x},{y}) jnp.linalg.multi_dot([{x},{y},{y}.T]) jnp.cross({x},{y})
    lax.dot_general({x},{y},(((1,),(1,)),((0,),(0,))))
    lax.dot_general({x},{x},(((0,1),(0,1)),((),())))
    lax.dot_general({x},{y},(((),()),((0,),(0,)))) jnp.matvec({x},{y}) jnp.vecdot({x},{y})
    jnp.convolve({x}.ravel(),{y}.ravel()) {x}@{y}+{x}[...,:1] jax.nn.relu({x}@{y}) {x}*2@{y}
    jax.nn.softmax({x}@{y}) jnp.sum({x}@{y},-1) jnp.exp(-jnp.square({x}@{y}))
    jnp.matmul({x},{y},preferred_element_type=jnp.bfloat16)
    lax.dot_general({x}>0,{y},(((1,),(1,)),((),())),preferred_element_type=jnp.float32)
    lax.dot_general({x},({y}*9).astype(jnp.int8),(((1,),(1,)),((),())),None,jnp.float32)
""".split()
# `{s}` is symmetric and positive definite.
LINALG = """
    jnp.linalg.cholesky({s}) jnp.linalg.solve({s},{x}) jnp.linalg.inv({s}) jnp.linalg.det({s})
    jnp.linalg.slogdet({s})[1] jnp.linalg.eigvalsh({s}) jnp.abs(jnp.linalg.qr({s})[1])
    jnp.linalg.svd({s},compute_uv=False) jax.scipy.linalg.expm({s}*0.1)
    jnp.linalg.matrix_power({s},2)
    jax.scipy.linalg.solve_triangular({s},{x},lower=True) jnp.linalg.lstsq({s},{x})[0]
    jax.scipy.linalg.cho_solve((jnp.linalg.cholesky({s}),True),{x}) jnp.linalg.cond({s})
    jax.scipy.sparse.linalg.cg({s}.dot,{x},maxiter=3)[0] jnp.linalg.pinv({s})
    lax.linalg.triangular_solve({s},{x},left_side=True) jax.scipy.linalg.lu({s})[2]
    jnp.einsum("ij,jk->ik",jnp.linalg.qr({s})[0],jnp.linalg.qr({s})[1])
""".split()
FFT = """
    jnp.fft.rfft({x}) jnp.fft.irfft(jnp.fft.rfft({x}),n={x}.shape[-1]) jnp.abs(jnp.fft.fft({x}))
    jnp.real(jnp.fft.ifft({x})) jnp.real(jnp.fft.fft2({x})) jnp.fft.fftshift({x})
    jnp.fft.irfft({x}) jax.scipy.signal.convolve({x},{x},mode="same")
""".split()
RANDOM = """
    jax.random.normal({k},{s}) jax.random.uniform({k},{s}) jax.random.split({k})
    jax.random.fold_in({k},3)
    jax.random.bernoulli({k},.5,{s}) jax.random.randint({k},{s},0,4) jax.random.gumbel({k},{s})
    jax.random.permutation({k},4) jax.random.truncated_normal({k},-1.,1.,{s})
    jax.random.bits({k},{s})
    jax.random.normal({k},{s},jnp.bfloat16) jax.random.exponential({k},{s}) jax.random.key_data({k})
    jax.random.categorical({k},{x}) {x}*jax.random.bernoulli({k},.5,{x}.shape)/.5
    jax.random.rayleigh({k},1.,{s}) jax.random.laplace({k},{s}) jax.random.orthogonal({k},2)
    {x}+jax.random.normal({k},{x}.shape,{x}.dtype) jax.random.choice({k},{x}) jax.random.clone({k})
    jax.random.multivariate_normal({k},jnp.zeros(2),jnp.eye(2)) jax.random.cauchy({k},{s})
""".split()


@operation("shapes", 3)
def moved(g: Generator) -> str:
    return g.choice(SHAPES).format(x=g.floats())


@operation("shapes", 0.7)
def moved_others(g: Generator) -> str:
    return g.choice(SHAPES[:26]).format(x=g.pick(lambda t: t.dtype != "key"))


@operation("shapes")
def transposed(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 1)
    return f"jnp.transpose({x}, {tuple(int(i) for i in g.rng.permutation(g.types[x].ndim))})"


@operation("shapes")
def concatenated(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0)
    y = g.like(x)
    return g.choice((f"jnp.concatenate([{x}, {y}])", f"jnp.concatenate([{x}, {y}], -1)"))


@operation("shapes", 0.5)
def zero_size(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0)
    return g.choice((f"{x}[:0]", "jnp.zeros((0, 3)) @ jnp.ones((3, 2))", f"jnp.sum({x}[:0], 0)"))


@operation("indexing", 3)
def indexed(g: Generator) -> str:
    try:
        index = g.pick(lambda t: t.dtype == "int32" and t.ndim < 2)
    except NoOperand:
        index = "jnp.array([1, 0])"
    return g.choice(INDEXING).format(x=g.floats(lambda t: t.ndim > 0), i=index)


@operation("indexing")
def scattered(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0 and t.shape[0] > 0)
    y = g.pick(lambda t: t.dtype == g.types[x].dtype and t.shape == g.types[x].shape[1:])
    method = g.choice("set add mul max min subtract".split())
    at = g.choice(("0", "jnp.array([0, 0])", "-1"))
    return f"{x}.at[{at}].{method}({y})"


@operation("sorting")
def sorted_(g: Generator) -> str:
    return g.choice(SORTING).format(x=g.floats(lambda t: t.ndim > 0))


@operation("sorting", 0.3)
def sorted_together(g: Generator) -> Draw:
    x = g.floats(lambda t: t.ndim > 0)
    y = g.like(x, other_shape=False)
    return Draw(f"lax.sort(({x}, {y}), num_keys=1)", results=2)


@operation("contractions", 2)
def dot(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0)
    y = g.pick(lambda t: t.dtype == g.types[x].dtype and t.ndim > 0)
    return g.choice(DOTS).format(x=x, y=y)


@operation("contractions", 2)
def dense(g: Generator) -> str:
    """A product that always fits: the weight may be moved, sliced or made on the spot."""
    x = g.floats(lambda t: t.ndim > 1)
    k, dtype = g.types[x].shape[-1], g.types[x].dtype
    try:
        w = g.pick(lambda t: t.dtype == dtype and t.ndim == 2 and k in t.shape)
        w = w if g.types[w].shape[0] == k else f"{w}.T"
    except NoOperand:
        w = f"jnp.linspace(-1., 1., {k * 3}).reshape({k}, 3).astype({dtype!r})"
    bias = g.choice(("", "", " + 0.1", f" + jnp.ones(({w}).shape[-1], {dtype!r})"))
    return f"({x} @ {w}){bias}"


@operation("contractions", 2)
def einsum(g: Generator) -> str:
    spec = g.choice(EINSUMS)
    left, right = spec.split("->")[0].split(",")
    x = g.floats(lambda t: t.ndim == len(left))
    size = dict(zip(left, g.types[x].shape, strict=True))

    def fits(t):
        same = t.dtype == g.types[x].dtype and t.ndim == len(right)
        return same and all(size.get(c, n) == n for c, n in zip(right, t.shape, strict=True))

    return f"jnp.einsum({spec!r}, {x}, {g.pick(fits)})"


@operation("contractions", 0.7)
def convolution(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim == 3 and 0 not in t.shape)
    channels, dtype = g.types[x].shape[1], g.types[x].dtype
    groups = channels if g.chance(0.3) else 1
    kernel = f"jnp.linspace(-1., 1., {2 * channels * 2}).reshape({2 * groups}, -1, 2)"
    kernel = f"{kernel}[:, :{channels // groups}].astype({dtype!r})"
    padding = g.choice(("'SAME'", "'VALID'", "[(2, 1)]"))
    more = g.choice(("", ", lhs_dilation=(2,)", ", rhs_dilation=(2,)"))
    stride = f"({g.integer(1, 2)},)"
    return (
        f"lax.conv_general_dilated({x}, {kernel}, {stride}, {padding}{more}, "
        f"feature_group_count={groups})"
    )


@operation("contractions", 0.3)
def ragged(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim == 2 and t.shape[0] > 1)
    rows, k = g.types[x].shape
    w = f"jnp.linspace(-1., 1., {2 * k * 2}).reshape(2, {k}, 2).astype({x}.dtype)"
    return f"lax.ragged_dot({x}, {w}, jnp.array([1, {rows - 1}], jnp.int32))"


@operation("contractions", 0.4)
def attention(g: Generator) -> str:
    q = g.floats(lambda t: t.ndim == 2 and 0 not in t.shape)
    k = g.like(q, other_shape=False)
    return g.choice(
        (
            f"jax.nn.dot_product_attention({q}[None, :, None], {k}[None, :, None], "
            f"{k}[None, :, None], is_causal=True)",
            f"jax.nn.softmax(jnp.where(jnp.tri({q}.shape[0], dtype=bool), {q} @ {k}.T, "
            f"jnp.finfo(jnp.float32).min)) @ {k}",
        )
    )


@operation("contractions", 0.3)
def rotary(g: Generator) -> str:
    """Integer coordinates in a product."""
    n = g.integer(2, 4)
    start = g.choice((0, 4000))
    return f"jnp.cos(jnp.outer(jnp.arange({n}) + {start}., 1. / 100 ** jnp.linspace(0., 1., 3)))"


@operation("linalg")
def linalg(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim == 2 and 0 not in t.shape)
    symmetric = f"({x} @ {x}.T / 4 + 2 * jnp.eye({x}.shape[0], dtype={x}.dtype))"
    return g.choice(LINALG).format(s=symmetric, x=x)


@operation("fft")
def fft(g: Generator) -> str:
    return g.choice(FFT).format(x=g.floats(lambda t: t.ndim > 0 and 0 not in t.shape))


@operation("random", 2)
def random(g: Generator) -> str:
    if any(t.dtype == "key" and not t.shape for n, t in g.types.items() if n in g.visible):
        key = g.pick(lambda t: t.dtype == "key" and not t.shape)
    else:
        key = f"jax.random.key({g.integer(0, 9)})"
    return g.choice(RANDOM).format(k=key, s=g.shape(g.integer(0, 2)), x=g.floats())


@operation("random", 0.2)
def one_of_keys(g: Generator) -> str:
    return f"{g.pick(lambda t: t.dtype == 'key' and t.ndim == 1)}[0]"


@operation("indexing", 0.5)
def integer_indexed(g: Generator) -> str:
    x = g.pick(lambda t: t.dtype in INTS and t.ndim > 0 and t.shape[0] > 0)
    return g.choice((f"{x}[0]", f"{x}.at[0].set(1)", f"jnp.sort({x})", f"{x}[::-1]"))
