"""Operations whose value says in which dtype they ran, however much the error model allows.

What random programs compute is dominated by the roundings of their products, four times as coarse
in the error model as they are. Here they average out, or lead out of float16's range.
"""

from __future__ import annotations

from .generator import Draw, Generator, operation

# Beyond float16's range, or bfloat16's; `{p}` is a product of the order of 1.
BEYOND = """
    jnp.sqrt(jnp.abs({p}+{c})) jnp.cbrt({p}*{c}) jnp.where({p}>0,{p},{c}) jnp.maximum({p},{c})
    jnp.tanh(({p}*{c})/{c}) jnp.sin(({p}+{c})/{c}) jnp.floor({p}-{c}) jnp.where({p}<0,{c},{p})
    jnp.clip({p},-1.,{c}) jnp.sqrt(jnp.abs({p}/{c})) jnp.pad({p},1,constant_values={c})
    jnp.cbrt(jnp.full_like({p},{c})+{p}) jnp.concatenate([{p},jnp.full_like({p},{c})])
""".split()
FAR = "1e5 -1e5 65520. 7e4 1e-8 -3e-8 3e38 1e-12 jnp.finfo(jnp.float32).max".split()
MASKED = """
    jax.nn.softmax(jnp.where({p}>9,{p},{c})) jnp.where({p}>0,{p},{c}) jnp.maximum({p}*0,{c})
    jnp.sum(jnp.where({p}>9,0.,{c})+{p},-1)/{c} jnp.max(jnp.where({p}>0,{p},{c}),-1)
""".split()
MASKS = "jnp.finfo(jnp.float32).min jnp.finfo(jnp.float32).min -1e9 -1e30".split()

# Sums whose elements' roundings average out: what is left is the rounding of the sum.
LONG = """
    jnp.sum({p}) jnp.sum(jnp.square({p})) jnp.mean({p}) jnp.sum(jnp.abs({p}),0) jnp.sum({p}*2+1)
    jnp.log(jnp.sum({p})) jnp.cumsum({p}.ravel())[-1] jnp.sum({p},(0,1)) jnp.linalg.norm({p})
    jnp.sum(jnp.tanh({p})) jnp.mean({p},0) jnp.sum(jnp.where({p}>1,{p},0.)) jnp.var({p})
    jnp.sum({p},dtype=jnp.float32) jax.nn.logsumexp({p}) 1-jnp.mean({p}) jnp.sqrt(jnp.sum({p}))
""".split()

# Positions up to 65,536: angles that 16 bits turn by many radians.
POSITIONS = """
    jnp.arange({n}.)+{s} (jnp.arange({n})+{s}).astype('float32') jnp.arange({s}.,{s}+{n}.)
    lax.iota('float32',{s}+{n})[{s}:] (lax.iota('int32',{n})*3+{s}).astype('float32')
    (jnp.arange({n}.)+{s})/2 65536.-jnp.arange({n}.) jnp.arange({n}.)*{s}
""".split()
ROTATED = """
    jnp.sin({t}[:,None]@{w}) jnp.cos({t}.reshape(-1,1)@{w}) jnp.einsum('ij,jk->ik',{t}[:,None],{w})
    jnp.sin({w}.T@{t}[None]) jnp.eye({n})@{t}[:,None] jnp.exp(1e-6*({t}[:,None]@{w}))
    lax.dot({t}[:,None],{w}) jnp.cos(jax.jit(jnp.matmul)({t}[:,None],{w}))
""".split()


def _product(g: Generator, long: bool = False) -> str:
    """A matrix product of random constants."""
    n, shift = (512, "+ 0.7") if long else (2, "- 0.4")
    seeds = [g.integer(0, 99) for _ in range(2)]
    left, right = (
        f"jnp.asarray(np.random.default_rng({seed}).random(({n}, 8, 8)) {shift}, 'float32')"
        for seed in seeds
    )
    return f"({left} @ {right})" if long else f"({left} @ {right})[{g.integer(0, 1)}]"


def _positions(g: Generator, n: int) -> str:
    positions = g.choice(POSITIONS).format(n=n, s=g.choice((301, 2049, 4001, 30001, 65530)))
    return f"({positions})"


@operation("probes", 2)
def beyond(g: Generator) -> str:
    return g.choice(BEYOND).format(p=_product(g), c=f"({g.choice(FAR)})")


@operation("probes", 1)
def masked(g: Generator) -> str:
    return g.choice(MASKED).format(p=_product(g), c=f"({g.choice(MASKS)})")


@operation("probes", 2)
def long_sum(g: Generator) -> str:
    return g.choice(LONG).format(p=_product(g, long=True))


@operation("probes", 2)
def rotated(g: Generator) -> str:
    n = g.integer(5, 8)
    w = g.choice(("jnp.array([[1.,0.1,0.01]])", "jnp.full((1,2),0.5)", "jnp.ones((1,1))"))
    return g.choice(ROTATED).format(t=_positions(g, n), w=w, n=n)


@operation("probes", 2)
def one_call_for_several_kinds(g: Generator) -> Draw:
    """The same inner jit, called with operands that need different dtypes."""
    g.counter += 1
    name = f"f{g.counter}j"
    product = _product(g)
    if g.chance(0.3):
        body, first, second = "a @ b", "jnp.cos(jnp.arange(4.))", _positions(g, 4)
        calls = [f"{x}[:, None], jnp.array([[1., 0.1]])" for x in (first, second)]
    elif g.chance(0.5):
        body = g.choice(("a * b", "a + b", "jnp.maximum(a, b)", "jnp.where(a > 0, a, b)"))
        calls = [f"{product}, {c}" for c in ("2.", g.choice(FAR))]
    else:
        body = g.choice(("a * 1.5 + b", "jnp.tanh(a) * b", "jnp.abs(a) + b", "a * a * b"))
        calls = [f"{x}, 0.7" for x in (product, f"jnp.exp(jnp.sum({product}, 0) + jnp.eye(8))")]
    if g.chance(0.3):
        calls.reverse()
    before = (f"{name} = jax.jit(lambda a, b: {body})",)
    return Draw(", ".join(f"{name}({c})" for c in calls), len(calls), before=before)
