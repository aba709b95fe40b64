"""Programs made of what has been silently wrong: large summands, positions, gates, repeated rows.

Each has a matrix product ``p`` of a parameter ``w`` and an argument ``x``, and meets it with
another array in some role (argument, parameter, constant, counted, of integers), shape and size. No
result may be further from float32 than twice the better of two simple rules (`by_hand`). In the
kinds of `kinds` the product is exact, and no result may be off by more than their bounds.

    python -m tests.fuzz.dangers --programs 1000 --seed 0
    python -m tests.fuzz.dangers --programs 1000 --only ranked
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_autocast import Policy, autocast
from jmp_autocast.interpreters.compat import jaxpr_as_fun

from .by_hand import Rounded, errors
from .command import run_many
from .comparison import interpreted, near
from .generator import Generator
from .kinds import KINDS, D, N, arrays, rows
from .program import NAMESPACE, jax_settings

SHAPES = ((N, D), (D,), (N, 1), (), (1, D))
# `{m}` is the magnitude, `{s}` the shape.
ROLES = {
    "argument": "y",
    "parameter": "params['v']",
    "constant": "CONSTANT",
    "negated": "(-y)",
    "moved": "(y[None])[0]",
    "counted": "jnp.broadcast_to((jnp.arange({n}.) * ({m} / {n})).reshape({first}), {s})",
    "integers": "(i * {m}).astype('float32')",
    "literal": "{m}",
}
MEETINGS = """
    p+y y+p p-y y-p p+2*y jnp.add(y,p) p*0.5+y (p+y)+p jax.jit(jnp.add)(p,y) y+p*params['g']
    jnp.maximum(p,y) jnp.minimum(y,p) jnp.where(p>0,p,y) p*y p/(1+jnp.abs(y)) jnp.clip(p,-1,y)
    lax.add(jnp.broadcast_to(y,p.shape),p) sum([p,y,p]) y-(p+p) p+y-y jnp.tanh(p)+y
""".split()
READERS = """
    s s-{m} jnp.floor(s) jnp.round(s).astype('int32') jnp.tanh((s-{m})/{m}) jax.nn.softmax(s-{m})
    jnp.tanh(s-{m}) jnp.sin(s-{m}) jax.nn.relu(s-{m})@w (s-{m})@w jnp.sqrt(jnp.abs(s-{m}))
    s@w jnp.sqrt(jnp.abs(s)) jnp.sin(s/{m}) jnp.mean(s,-1) jnp.square(s/{m}) jax.nn.relu(s)@w
    jax.nn.sigmoid(s/{m})@w (s-jnp.mean(s,-1,keepdims=True)) s*jnp.float32(0.5) jnp.max(s,-1) s/{m}
""".split()
MASKS = """
    p*(i>0) p*i.astype('float32') jnp.where(i>0,p,-1e9) (p*i.astype('float32'))@w p+(1.-(i>0))*-1e4
    jax.nn.softmax(p+(1.-(i>0).astype('float32'))*jnp.finfo(jnp.float32).min)@w
    (i.T.astype('float32')@p)@w jax.nn.one_hot(i[:,0],D)@w+p p@(i[:D].astype('float32')*w)
""".split()
POSITIONS = """
    jnp.sin(t[:,None]*jnp.abs(w[0])) jnp.sin(t[:,None]@jnp.abs(w[:1])) jnp.cos(t[:,None]+p)
    jnp.einsum('n,d->nd',t,w[0]) (t[:,None]+p).astype('int32') jnp.floor(p/8+t[:,None])
    jnp.sin(jnp.stack([t,2*t],1)@w[:2]) (t[:,None]*2+p-t[:,None]) jnp.sin(t/{m}*jnp.mean(p,-1))
    jnp.exp(-jnp.square((t[:,None]-t[None])/{m}))@p jnp.interp(p[:,0]+{m}/2,t,t) (p+t[:,None])@w
""".split()
WINDOWS = """
    lax.reduce_window(p+4.,0.,lax.add,(4,4),(1,1),'VALID') jnp.cumsum(p+1.,0) jnp.cumsum(p,1)@w
    lax.reduce_window(jnp.tile(jnp.square(p),(8,8)),0.,lax.add,(64,32),(8,8),'VALID')/2048
    jnp.mean(jnp.tile(p+3.,(16,1)),0) jax.ops.segment_sum(p+1.,jnp.zeros(N,'int32'),2)
    jnp.convolve(p[:,0]+3.,jnp.ones(8)/8.,'valid')
    lax.reduce_window(p,-jnp.inf,lax.max,(2,2),(1,1),'SAME')
""".split()
ROWS = """
    p[jnp.zeros(512,'int32')]@w jnp.take(p,i[:,0]%4,axis=0)@w jnp.repeat(p,32,0)@w
    (p[:1]+jnp.ones((512,1)))@w jnp.tile(p,(32,1))@w p[jnp.abs(i[:,0])%3]*p
    jnp.broadcast_to(p[0],(300,D))@w jnp.take_along_axis(p,jnp.abs(i)%D,1)@w
    p.at[jnp.zeros(N,'int32')].add(p)[:4]@w
""".split()
GATES = """
    a*p+(1-a)*x (1-a)*p ((1.-a)*p)@w jnp.log(1-a) a*p+(1-a)*(p@w) 1/(1-a) jnp.log(a) (a-1)*p
    lax.scan(gated,jnp.zeros_like(x),None,length=64)[0] p*a*(1-a) (1-lax.erf(p/2))*p
""".split()
UPDATES = """
    w2-w (w2-w)/{r} x@w2 jnp.tanh(x@w2) w2
""".split()
AROUND = (
    "{e}",
    "jax.jit(lambda p: {e})(p)",
    "jax.checkpoint(lambda p: {e})(p)",
    "jax.vmap(lambda p: {e})(p[None])[0]",
    "lax.scan(lambda c, p: (c, {e}), 0, jnp.stack([p, p]))[1][0]",
)
# Of 60 the medians of `autocast` and of a rule that rounds alike differed by 15 %.
_NEIGHBORS = 25
FAMILIES = {
    "summands": 0.4, "masks": 0.1, "positions": 0.12, "windows": 0.08, "rows": 0.1, "gates": 0.1,
    "updates": 0.1, **dict.fromkeys(KINDS, 1 / len(KINDS)),
}  # fmt: skip
# A bound that is missed with these other numbers as well is missed by no luck of a rounding.
_OTHERS = 4
TABLES = {"masks": MASKS, "positions": POSITIONS, "windows": WINDOWS, "rows": ROWS, "gates": GATES}
STEPS = (
    "w2 = w2 - R * grad(w2)",
    "w2 = w2 + -R * grad(w2)",
    "w2 = jax.tree.map(lambda a, g: a - R * g, w2, grad(w2))",
)


@dataclasses.dataclass(frozen=True)
class Danger:
    """A program, its arguments and the dtype that it is run in."""

    family: str
    text: str
    constant: np.ndarray
    args: tuple[Any, ...]
    dtype: str

    def function(self) -> Any:
        namespace = {**NAMESPACE, "CONSTANT": jnp.asarray(self.constant), "N": N, "D": D}
        exec(compile(self.text, "<danger>", "exec"), namespace)
        return namespace["program"]


def _statements(g: Generator, family: str, shape: Any, m: float) -> tuple[list[str], list[str]]:
    """Returns the statements of a program, and the expressions that it returns."""
    if family == "summands":
        n = max(shape, default=1)
        first = tuple(n if k == n else 1 for k in shape)
        leaf = g.choice(list(ROLES.values())).format(m=m, n=n, first=first, s=shape)
        readers = [g.choice(READERS).format(m=m) for _ in range(g.integer(1, 2))]
        return [f"y = {leaf}", f"s = {g.choice(MEETINGS)}"], readers
    if family == "updates":
        rate = 10.0 ** -g.integer(1, 4)
        lines = [f"R, w2 = {rate}, w", "grad = lambda w: x.T @ jnp.tanh(x @ w - y)"]
        lines += [g.choice(STEPS)] * g.integer(1, 5)
        return lines, [g.choice(UPDATES).format(r=rate)]
    times = (f"jnp.arange({N}.)*{m / N}", f"jnp.arange({N}.)+{m}", f"y[:,0]+{m}",
             "jnp.cumsum(jnp.abs(i[:,0])).astype('float32')")  # fmt: skip
    lines = [
        f"t = {g.choice(times)}",
        f"a = jax.nn.sigmoid(p * {g.choice((1.0, 4.0))} + {g.choice((0.0, 4.0))})",
        "gated = lambda h, _: (a * h + (1 - a) * x, None)",
    ]
    return lines, [g.choice(TABLES[family]).format(m=m)]


def _of_kind(g: Generator, family: str) -> Danger:
    kind = KINDS[family]
    head, order = g.choice(kind.heads)
    # Positions in the head say what a product reads, and what is added to it.
    names = dict(zip(order.split(), head.split(", "), strict=True))
    result = g.choice(AROUND).replace("{e}", g.choice(rows(family)))
    lines = [f"def program({head}):", f"w = {names['params']}['w']", "p = x @ w"]
    lines += [line.replace("DATA", names["y"]) for line in kind.lines]
    text = "\n    ".join([*lines, f"return ({result},)"])
    return Danger(family, text, np.zeros(0), arrays(family, order, g.rng), g.choice(kind.dtypes))


def draw(seed: int, index: int, only: str = "") -> Danger:
    """Returns program number ``index`` of a campaign; equal numbers give equal programs.

    Args:
        seed: The number of the campaign.
        index: The number of the program.
        only: The one family that is drawn; any by default.
    """
    g = Generator((seed, index, 7))
    family = g.choice(list(FAMILIES), list(FAMILIES.values()))
    family = only or family
    if family in KINDS:
        return _of_kind(g, family)
    m = g.choice((1.0, 10.0, 100.0, 1000.0, 10000.0))
    shape = g.choice(SHAPES) if family == "summands" else (N, D)
    lines, readers = _statements(g, family, shape, m)
    around = g.choice(AROUND)
    results = [around.replace("{e}", reader) for reader in readers]
    text = "\n    ".join(
        [
            "def program(params, x, y, i):",
            "w = params['w']",
            "p = x @ w",
            *lines,
            f"return ({', '.join(results)},)",
        ]
    )
    normal = lambda *shape: np.asarray(g.rng.normal(size=shape), np.float32)
    # What is left when the magnitude is taken away is of the order of the product.
    large = lambda: np.asarray(m + g.rng.normal(size=shape), np.float32)
    params = {"w": normal(D, D) / 3, "v": large(), "g": normal(D)}
    integers = np.asarray(g.rng.integers(0, 3, shape), np.int32)
    args = params, normal(N, D), large(), integers
    return Danger(family, text, large(), args, g.choice(("bfloat16", "float16")))


def _derived(fn: Any, scale: float) -> Any:
    """The gradients of a weighted sum of a program's results, scaled on the way as users do."""

    def total(params: Any, *data: Any) -> Any:
        outs = [o for o in fn(params, *data) if jnp.issubdtype(o.dtype, jnp.inexact)]
        # Of one sign, so that a sum in 16 bits stops growing.
        weights = [1 + 0.5 * jnp.cos(jnp.arange(o.size)).reshape(o.shape) for o in outs]
        return scale * sum(jnp.sum(o * w) for o, w in zip(outs, weights, strict=True))

    return lambda *args: [g / scale for g in jax.tree.leaves(jax.grad(total)(*args))]


def _differentiates(danger: Danger) -> bool:
    """Whether a program has a gradient: an integer has none, and that of a choice jumps."""
    types = jax.eval_shape(danger.function(), *danger.args)
    chooses = ("imum(p", "imum(y", "clip(p", "where(p", "max(s")
    return any(jnp.issubdtype(t.dtype, jnp.inexact) for t in types) and not any(
        name in danger.text for name in chooses
    )


def _results(fn: Any, leaves: Any) -> list[Any]:
    # In NumPy, as the jaxpr says: nothing is compiled, and XLA keeps no excess digits.
    return interpreted(jax.jit(fn).trace(*leaves), leaves)


def _errors(
    danger: Danger, args: tuple[Any, ...], gradients: bool, scale: float = 1.0
) -> tuple[list[float], list[list[float]]]:
    """Returns the error of each result of `autocast`, and of each under every simple rule."""
    fn = danger.function()
    cast = autocast(fn, policy=Policy(danger.dtype))
    if gradients:
        fn, cast = _derived(fn, scale), _derived(cast, scale)
    closed = jax.make_jaxpr(fn)(*args)
    leaves, count = jax.tree.leaves(args), len(jax.tree.leaves(args[0]))
    leaf = [k < count for k in range(len(leaves))]
    exact = _results(jaxpr_as_fun(closed), leaves)
    found = _results(lambda *xs: cast(*jax.tree.unflatten(jax.tree.structure(args), xs)), leaves)
    # A bias, or a choice, of parameters and constants is rounded as it is by hand: the planner's
    # page says so. PyTorch rounds a bias inside of `linear`.
    by_hand_alone = any(leaf in danger.text for leaf in ("params['v']", "CONSTANT"))
    rules = [Rounded(danger.dtype, leaves_vote=v) for v in (True, False)[by_hand_alone:]]
    run = lambda rule, *xs: rule.run(closed, xs, leaf)
    if gradients and danger.family not in ("rows", "windows"):
        # What PyTorch and an author by hand differentiate is the rounded program, with cotangents
        # in its dtypes. What is promised beyond it are sums: of rows and of windows.
        forward, flat = jax.make_jaxpr(danger.function())(*args), jax.tree.structure(args)

        def run(rule: Rounded, *xs: Any) -> Any:
            rounded = lambda *a: rule.run(forward, jax.tree.leaves(a), leaf)
            return _derived(rounded, scale)(*jax.tree.unflatten(flat, xs))

    theirs = [errors(exact, _results(functools.partial(run, rule), leaves)) for rule in rules]
    return errors(exact, found), theirs


def _complaints(danger: Danger, ours: list[float], rules: list[list[float]]) -> list[str]:
    best = list(map(min, zip(*rules, strict=True)))
    # Rounded results differ by luck: four units in the last place are always allowed, and where
    # both rules lose most of a result there is nothing to compare with.
    least = 2 * float(jnp.finfo(danger.dtype).eps)
    return [
        f"result {k}: error {our:.2g}, the better of the rules {theirs:.2g}"
        for k, (our, theirs) in enumerate(zip(ours, best, strict=True))
        if our > max(2 * theirs, least) and theirs < 0.25
    ]


def _digits_of_float32(danger: Danger, args: tuple[Any, ...], gradients: bool) -> list[float]:
    """Returns how far float32 itself is from float64, relative to the largest element."""
    fn = _derived(danger.function(), 1.0) if gradients else danger.function()
    exact = _results(fn, args)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype("float64") if x.dtype.kind == "f" else x, args)
        return errors(_results(fn, wide), exact)


def _off(danger: Danger, args: tuple[Any, ...]) -> float:
    """Returns how far a program of a kind is from float32, with the scale of a loss that fits."""
    found = []
    for scale in (2.0**10, 1.0) if KINDS[danger.family].gradients else (None,):
        fn = danger.function()
        cast = autocast(fn, policy=Policy(danger.dtype))
        if scale is not None:
            fn, cast = _derived(fn, scale), _derived(cast, scale)
        exact = _results(fn, args)
        found.append(max(errors(exact, _results(cast, args))))
    return min(found)


def _check_kind(danger: Danger) -> str:
    kind = KINDS[danger.family]
    off = _off(danger, danger.args)
    if off <= kind.bound:
        return ""
    order = dict(kind.heads)[danger.text.partition("(")[2].partition(")")[0]]
    others = (np.random.default_rng(k) for k in range(_OTHERS))
    tried = [off, *(_off(danger, arrays(danger.family, order, rng)) for rng in others)]
    off = float(np.median(tried))
    return f"error {off:.2g}, allowed {kind.bound:.2g}" if off > kind.bound else ""


def check(danger: Danger, gradients: bool) -> str:
    """Returns what is wrong with a program's results, or its gradients; empty if nothing is.

    What looks wrong is tried with other digits as well: the luck of a rounding does not come back,
    a lost digit does. Gradients in float16 are scaled there, as far as they stay finite: without
    that small ones are zero.
    """
    if danger.family in KINDS:
        return _check_kind(danger)
    gradients &= _differentiates(danger)
    if not _complaints(danger, *_errors(danger, danger.args, gradients)):
        return ""
    tried = []
    for k in range(_NEIGHBORS):
        args = near(danger.args, k, 0.01)
        ours, rules = _errors(danger, args, gradients)
        for scale in (2.0**12, 2.0**6) if gradients and danger.dtype == "float16" else ():
            scaled = _errors(danger, args, gradients, scale)
            if np.isfinite(scaled[0]).all():
                ours, rules = scaled
                break
        noise = 4 * np.asarray(_digits_of_float32(danger, args, gradients))
        tried.append([ours, *(np.maximum(rule, noise) for rule in rules)])
    ours, *rules = np.median(tried, axis=0).tolist()
    return "; ".join(_complaints(danger, ours, rules))


def run(seed: int, index: int, only: str = "") -> tuple[Danger, str]:
    """Draws and checks one program: its values, or for every third one its gradients."""
    danger = draw(seed, index, only)
    with warnings.catch_warnings(), jax_settings(False), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return danger, check(danger, gradients=index % 3 == 2)
        except Exception as error:  # any error of autocast is a finding
            return danger, f"{type(error).__name__}: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    def checked(seed: int, index: int, only: str) -> tuple[str, str]:
        danger, message = run(seed, index, only)
        return danger.family, message and f"{danger.dtype}\n{danger.text}\n{message}"

    return run_many("dangers", checked, argv, FAMILIES)


if __name__ == "__main__":
    raise SystemExit(main())
