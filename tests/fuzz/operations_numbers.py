"""Operations on numbers: elementwise, edges of float16, integers, complex, casts, reductions."""

from __future__ import annotations

from .generator import COMPLEX, FLOATS, INTS, Draw, Generator, NoOperand, operation

UNARY = """
    jnp.tanh jnp.sin jnp.cos jnp.abs jnp.negative jnp.sign jnp.floor jnp.ceil jnp.round jnp.square
    jax.nn.sigmoid jax.nn.relu jax.nn.gelu jax.nn.silu jax.nn.softplus jax.nn.elu jax.lax.erf
    jnp.cbrt jnp.arctan jnp.arcsinh jnp.trunc jnp.sinc jax.nn.leaky_relu jax.nn.relu6 jnp.nan_to_num
    jax.nn.log_sigmoid jnp.expm1 jnp.exp jnp.exp2 jnp.sinh jnp.isfinite jax.nn.hard_tanh jax.nn.mish
""".split()

# The domain is bounded in the expression.
GUARDED = """
    jnp.log(jnp.abs({x})+0.5) jnp.log1p({x}**2) jnp.sqrt(jnp.abs({x})) lax.rsqrt({x}**2+1)
    jnp.exp(-jnp.abs({x})) lax.erf_inv(jnp.tanh({x})*0.9) jnp.arcsin(jnp.sin({x})*0.9)
    1/({x}**2+1) jnp.power(jnp.abs({x})+0.1,1.5) {x}**3 {x}**-2 jnp.reciprocal({x}) 2.0**{x}
    jnp.tan({x}) jnp.arctanh(jnp.tanh({x})*0.9) jnp.log({x}) jnp.sqrt({x}) {x}**4
    jnp.arccosh({x}**2+1.5) jnp.where({x}>0,{x},0.) jnp.clip({x},-1,1) lax.integer_pow({x},5)
    jax.scipy.special.gammaln(jnp.abs({x})+1) jax.scipy.special.digamma({x}**2+1)
    jnp.where({x}==0,1.,{x}) lax.stop_gradient({x}) lax.optimization_barrier({x})
    jnp.heaviside({x},0.5) jnp.deg2rad({x}) 1-{x} 0.5*{x}+0.25 jax.scipy.special.erfc({x})
    lax.reduce_precision({x},8,10) jnp.cosh({x}) jax.nn.softplus({x}) jnp.log(jax.nn.sigmoid({x}))
    -jnp.log(1-jnp.tanh({x})**2+1e-6) jnp.log(1e-8+{x}**2) jnp.log1p(-jax.nn.sigmoid({x}))
    {x}*jnp.subtract(1.,.25)
""".split()

BINARY = """
    {x}+{y} {x}-{y} {x}*{y} {x}/({y}**2+1) jnp.maximum({x},{y}) jnp.minimum({x},{y}) {x}/{y}
    jnp.arctan2({x},{y}) jnp.hypot({x},{y}) jnp.logaddexp({x},{y}) jnp.where({x}>{y},{x},{y})
    ({x}+{y})/2 {x}*jnp.tanh({y}) jnp.copysign({x},{y}) jnp.fmod({x},jnp.abs({y})+1)
    jnp.power(jnp.abs({x})+0.1,{y}) {x}-lax.stop_gradient({y}) jnp.where({x}<{y},{x},0.)
    jnp.square({x}-{y}) lax.select_n({x}<{y},{x},{y}) jnp.float_power(2.,{x}*0.1)+{y}
    jnp.interp({x},jnp.linspace(-1.,1.,5),jnp.linspace(0.,1.,5)) jax.scipy.special.xlogy({x},{y}**2)
    jnp.polyval(jnp.array([1.,.5,-1.]),{x})
""".split()

# Around the range of float16: what becomes inf, 0, 1 or a subnormal there, or almost does. None is
# a subnormal of float32: XLA takes it for 0 in some programs and not in others, in float32 too.
EDGES = """
    65504. 65520. 65519. 6e-8 2e-8 1e-4 6.1e-5 1e-7 1e-8 1e-12 1e5 3e38 2e-38 -65520. 0.99999
    1.0000001 1-1e-7 -1e9 jnp.inf -jnp.inf jnp.finfo(jnp.float32).min jnp.finfo(jnp.float32).max
    jnp.finfo(jnp.float32).eps jnp.finfo(jnp.float32).tiny jnp.finfo(jnp.float16).max 0. -0. 2048.
""".split()
WITH_EDGE = """
    {x}+{c} {x}*{c} jnp.maximum({x},{c}) jnp.minimum({x},{c}) {x}-{c} jnp.where({x}>0,{x},{c})
    jnp.clip({x},{c}) jnp.full_like({x},{c}) {x}/({c}) {x}<{c} {x}/(jnp.abs({x})+{c})
    jax.nn.softmax(jnp.where({x}>0,{x},{c})) jnp.where({x}<{c},1.,{x}) jnp.maximum({x},{c})/3
    jnp.concatenate([{x}.ravel(),jnp.full((2,),{c})]) {x}@jnp.full({x}.shape[-1:]+(2,),{c})
    jnp.log(jnp.abs({x})+{c}) jnp.pad({x},1,constant_values={c}) ({x}+{c})-{c} ({x}*{c})/{c}
    jnp.where({x}>0,0.,{c})+{x} lax.clamp(-1.,{x},{c}) jnp.max({x},initial={c})
    jnp.clip({x},{c},1.)*{x} {c}-{x} {c}/(1+{x}**2) lax.rsqrt({x}**2+{c})
    jnp.array([1.,{c},-2.])*jnp.sum({x}) jnp.exp({x}+{c}) jnp.tril({x})*{c}
""".split()

REDUCTIONS = """
    jnp.sum jnp.mean jnp.max jnp.min jnp.prod jnp.var jnp.std jnp.linalg.norm jnp.median jnp.ptp
    jax.nn.logsumexp jax.nn.softmax jax.nn.log_softmax jnp.cumsum jnp.cumprod lax.cumlogsumexp
    lax.cummax jnp.argmax jnp.argmin jnp.nansum jax.nn.standardize jnp.count_nonzero jnp.average
    jnp.nanmax jnp.any jnp.all jnp.trapezoid
""".split()

DTYPES = "float32 float32 float16 bfloat16 int32 bool float8_e4m3fn float8_e5m2 complex64".split()


@operation("elementwise", 3)
def unary(g: Generator) -> str:
    return f"{g.choice(UNARY)}({g.floats()})"


@operation("elementwise", 3)
def guarded(g: Generator) -> str:
    return g.choice(GUARDED).format(x=g.floats())


@operation("elementwise", 4)
def binary(g: Generator) -> str:
    x = g.floats()
    y = g.like(x)
    return g.choice(BINARY).format(x=x, y=y)


@operation("elementwise", 0.7)
def select(g: Generator) -> str:
    x = g.floats()
    mask = g.pick(lambda t: t.dtype == "bool")
    return f"jnp.where({mask}, {x}, {g.choice((g.like(x), '0.', '-1e9', '1'))})"


@operation("elementwise", 0.7)
def mixed_dtypes(g: Generator) -> str:
    x, y = g.floats(), g.floats()
    return f"{x} {g.choice('+-*')} {y}"


@operation("elementwise", 0.5)
def weak_scalar(g: Generator) -> str:
    x = g.floats()
    c = g.choice(("jnp.asarray(0.5)", "jnp.asarray(3)", "lax.convert_element_type(2., float)"))
    op = g.choice("+*-")
    return g.choice((f"{x} {op} {c}", f"{c} * 2", f"jnp.where({x} > 0, {c}, 1.)"))


@operation("edges")
def edge(g: Generator) -> str:
    return g.choice(WITH_EDGE).format(x=g.floats(), c=f"({g.choice(EDGES)})")


@operation("numbers")
def integers(g: Generator) -> str:
    x = g.pick(lambda t: t.dtype in INTS or t.dtype == "bool")
    y = g.like(x)
    templates = """
        {x}+{y} {x}*{y} {x}//3 {x}%3 {x}&{y} {x}^{y} {x}<{y} ~{x} -{x} jnp.sum({x}) {x}/2 {x}*0.5
        jnp.where({x}>0,{x},{y}) jnp.cumsum({x}) jnp.sqrt(jnp.abs({x})) {x}**2 {x}<<1
        jnp.max({x},initial=0) lax.population_count({x}) jnp.mean({x}) jnp.exp({x})
    """
    return g.choice(templates.split()).format(x=x, y=y)


@operation("numbers")
def number_to_float(g: Generator) -> str:
    x = g.pick(lambda t: t.dtype in INTS or t.dtype == "bool")
    return f"{x}.astype({g.choice(('float32', 'float32', 'float16', 'bfloat16'))!r})"


@operation("numbers", 0.6)
def iota(g: Generator) -> str:
    shape = g.shape(g.integer(1, 2))
    dtype = g.choice(("int32", "float32", "float32", "bfloat16"))
    first = g.choice((0, 0, 3000, 100000))
    return f"lax.broadcasted_iota({dtype!r}, {shape}, {len(shape) - 1}) + {first}"


@operation("numbers", 0.7)
def to_complex(g: Generator) -> str:
    x = g.floats(lambda t: t.dtype in ("float32", "float64"))
    return g.choice((f"lax.complex({x}, {g.like(x, False)})", f"jnp.exp(1j * {x})", f"{x} * 1j"))


@operation("numbers", 0.7)
def of_complex(g: Generator) -> str:
    z = g.pick(lambda t: t.dtype in COMPLEX)
    templates = "jnp.real({z}) jnp.imag({z}) jnp.abs({z}) jnp.conj({z}) {z}*{z} jnp.angle({z})"
    templates += " jnp.exp({z}*0.1) jnp.sum({z}) {z}/(1+jnp.abs({z})) {z}.T {z}+1 jnp.square({z})"
    return g.choice(templates.split()).format(z=z)


@operation("casts", 2)
def cast(g: Generator) -> str:
    x = g.floats()
    dtype = g.choice(DTYPES + (["float64", "int64"] if g.x64 else []))
    return f"{x}.astype({dtype!r})"


@operation("casts")
def there_and_back(g: Generator) -> str:
    x = g.floats()
    dtype = g.choice("float16 bfloat16 float8_e4m3fn int32 bool".split())
    return f"{x}.astype({dtype!r}).astype({g.types[x].dtype!r})"


@operation("casts", 0.6)
def from_eight_bits(g: Generator) -> str:
    x = g.pick(lambda t: t.dtype.startswith("float8"))
    return f"{x}.astype({g.choice(('float32', 'bfloat16', 'float16'))!r})"


@operation("casts", 0.4)
def bits(g: Generator) -> str:
    x = g.floats(lambda t: t.dtype == "float32")
    return g.choice(
        (
            f"lax.bitcast_convert_type({x}, jnp.int32)",
            f"lax.bitcast_convert_type(lax.bitcast_convert_type({x}, jnp.int32), jnp.float32)",
            f"jnp.frexp({x})[0]",
            f"jnp.signbit({x})",
            f"jnp.nextafter({x}, 1.)",
        )
    )


@operation("reductions", 3)
def reduction(g: Generator) -> str:
    x, name = g.floats(), g.choice(REDUCTIONS)
    ndim = g.types[x].ndim
    axis = f", axis={g.integer(-ndim, ndim - 1)}" if ndim and g.chance(0.6) else ""
    if name.startswith("lax."):
        axis = f", axis={g.integer(0, ndim - 1)}" if ndim else ", axis=0"
    elif axis and g.chance(0.4) and "cum" not in name and "nn" not in name and "ptp" not in name:
        axis += ", keepdims=True"
    if name in ("jnp.sum", "jnp.mean", "jnp.cumsum") and g.chance(0.15):
        axis += f", dtype={g.choice(('float32', 'bfloat16', 'float16'))!r}"
    return f"{name}({x}{axis})"


@operation("reductions", 0.6)
def normalized(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0)
    return g.choice(
        (
            f"({x} - jnp.mean({x}, -1, keepdims=True)) / jnp.sqrt("
            f"jnp.var({x}, -1, keepdims=True) + 1e-5)",
            f"{x} * lax.rsqrt(jnp.mean(jnp.square({x}), -1, keepdims=True) + 1e-6)",
            f"{x} / (jnp.linalg.norm({x}) + 1e-3)",
            f"jnp.exp({x} - jnp.max({x}, -1, keepdims=True))",
            f"-jnp.sum({x} * jax.nn.log_softmax({x}))",
        )
    )


@operation("reductions", 0.5)
def window(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim == 2 and min(t.shape) > 1)
    size = (2, g.integer(1, 2))
    kind = g.choice(("lax.add, 0.", "lax.max, -jnp.inf", "lax.min, jnp.inf"))
    first, second = kind.split(", ")
    operator = f"jnp.asarray({second}, {x}.dtype), {first}"
    return f"lax.reduce_window({x}, {operator}, {size}, (1, 1), {g.choice(('SAME', 'VALID'))!r})"


@operation("reductions", 0.3)
def reduce_by(g: Generator) -> str:
    x = g.floats(lambda t: t.ndim > 0)
    return f"lax.reduce({x}, jnp.ones((), {x}.dtype), lambda a, b: a * b + 0 * a, (0,))"


@operation("reductions", 0.4)
def variadic_reduce(g: Generator) -> Draw:
    x = g.floats(lambda t: t.ndim > 0)
    y = g.like(x, other_shape=False)
    zero = f"jnp.zeros((), {x}.dtype)"
    return Draw(
        f"lax.reduce(({x}, {y}), ({zero}, {zero}), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,))",
        results=2,
    )


@operation("numbers", 0.5)
def comparison(g: Generator) -> str:
    x = g.floats()
    if g.types[x].dtype not in FLOATS:
        raise NoOperand
    y = g.choice((g.like(x), "0.", "0.5"))
    return f"{x} {g.choice(('<', '<=', '>', '==', '!='))} {y}"
