"""The generator: draws operations, and keeps those that JAX can trace."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .program import ArrayType, Def, Let, Program, function, jax_settings, pruned

FLOATS = ("float32", "float16", "bfloat16", "float64")
COMPLEX = ("complex64", "complex128")
INTS = ("int32", "int8", "uint8", "uint32", "int64")


class NoOperand(Exception):
    """The pool has no value that the operation could take."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """What an operation drew: an expression and the functions it calls."""

    expr: str
    results: int = 1
    defs: tuple[Def, ...] = ()
    before: tuple[str, ...] = ()


Sampler = Callable[["Generator"], "str | Draw"]
OPERATIONS: dict[str, list[tuple[Sampler, float]]] = {}


def operation(family: str, weight: float = 1.0) -> Callable[[Sampler], Sampler]:
    """Registers an operation: a function that draws operands and returns source text."""

    def register(sampler: Sampler) -> Sampler:
        OPERATIONS.setdefault(family, []).append((sampler, weight))
        return sampler

    return register


# How often each family is drawn.
WEIGHTS = {
    "elementwise": 5,
    "edges": 2.5,
    "numbers": 2,
    "reductions": 3,
    "contractions": 4,
    "shapes": 3,
    "indexing": 3,
    "sorting": 1.5,
    "linalg": 1,
    "fft": 0.5,
    "random": 1,
    "casts": 1.5,
    "control": 3.5,
    "library": 1,
    "probes": 0.5,
}


class Generator:
    """Draws one program; equal seeds give equal programs."""

    def __init__(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.types: dict[str, ArrayType] = {}
        self.visible: list[str] = []
        self.body: list[Let] = []
        self.products: set[str] = set()  # what contractions feed into: 16 bits, if anything is
        self.depth = 0
        self.counter = 0
        self.x64 = bool(self.rng.random() < 0.2)
        # Few sizes, so that operands fit one another.
        self.sizes = [int(self.rng.integers(1, 5)), int(self.rng.integers(2, 5))]
        # A product of at most 4 summed elements is none for a matrix unit.
        if self.rng.random() < 0.5:
            self.sizes[1] += 4
        if self.rng.random() < 0.05:
            self.sizes[0] = 0

    # --- random choices ---------------------------------------------------------------------

    def choice(self, items: Sequence[Any], p: Sequence[float] | None = None) -> Any:
        if not len(items):
            raise NoOperand
        if p is not None:
            return items[int(self.rng.choice(len(items), p=np.asarray(p) / np.sum(p)))]
        return items[int(self.rng.integers(len(items)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def shape(self, ndim: int | None = None) -> tuple[int, ...]:
        if ndim is None:
            ndim = self.choice((0, 1, 2, 3), (1, 3, 6, 1.5))
        return tuple(self.choice(self.sizes) for _ in range(ndim))

    def fresh(self) -> str:
        self.counter += 1
        return f"v{self.counter}"

    # --- operands ---------------------------------------------------------------------------

    def pick(self, fits: Callable[[ArrayType], bool]) -> str:
        """A visible value; late ones are likelier, so that programs are deep."""
        names = [name for name in self.visible if fits(self.types[name])]
        return self.choice(names, [1 + i for i in range(len(names))] if names else None)

    def floats(self, fits: Callable[[ArrayType], bool] = lambda t: True) -> str:
        """A float value, mostly float32."""
        f32 = [n for n in self.visible if (t := self.types[n]).dtype == "float32" and fits(t)]
        products = [name for name in f32 if name in self.products]
        if products and self.chance(0.5):
            return self.choice(products)
        if f32 and self.chance(0.85):
            return self.choice(f32, [1 + i for i in range(len(f32))])
        return self.pick(lambda t: t.dtype in FLOATS and fits(t))

    def like(self, name: str, other_shape: bool = True) -> str:
        """A second operand: of the same dtype, and of a shape that broadcasts."""
        want = self.types[name]

        def fits(t: ArrayType) -> bool:
            if t.dtype != want.dtype:
                return False
            if not other_shape or self.chance(0.7):
                return t.shape == want.shape
            try:
                return np.broadcast_shapes(t.shape, want.shape) is not None
            except ValueError:
                return False

        return self.pick(fits)

    def fitted(self, name: str, to: ArrayType) -> str:
        """An expression that makes a value have another shape and dtype."""
        have = self.types[name]
        expr = name
        if have.shape != to.shape:
            try:
                fits = np.broadcast_shapes(have.shape, to.shape) == to.shape
            except ValueError:
                fits = False
            if not fits:
                number = have.dtype in FLOATS + COMPLEX
                expr = f"jnp.mean({expr})" if number and 0 not in have.shape else f"jnp.sum({expr})"
            expr = f"jnp.broadcast_to({expr}, {to.shape})"
        if have.dtype != to.dtype or "sum" in expr or have.weak:
            if have.dtype in COMPLEX and to.dtype not in COMPLEX:
                expr = f"jnp.real({expr})"
            expr = f"({expr}).astype({to.dtype!r})"
        return expr

    # --- statements -------------------------------------------------------------------------

    def let(self, draw: str | Draw, family: str) -> bool:
        """Adds a statement if it traces. Says whether it did."""
        if isinstance(draw, str):
            draw = Draw(draw)
        names = tuple(self.fresh() for _ in range(draw.results))
        let = Let(names, (), draw.expr, draw.defs, draw.before, family)
        operands = sorted(name for name in let.reads() if name in self.types)
        own = {name for d in draw.defs for name in _bound(d)}
        operands = [name for name in operands if name not in own]
        if any(name not in self.visible for name in operands):
            return False
        text = "\n    ".join((f"def step({', '.join(operands)}):", *let.lines()))
        text += f"\n    return ({' '.join(name + ',' for name in names)})"
        types = [abstract(self.types[name]) for name in operands]
        traced = function(text, "step")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                out = jax.eval_shape(traced, *types)
        except Exception:  # no program: operands that do not fit, or an axis that is not there
            return False
        types = []
        for aval in out:
            if not hasattr(aval, "dtype") or len(aval.shape) > 4 or np.prod(aval.shape) > 256:
                return False
            types.append(type_of(aval))
        self.types.update(zip(names, types, strict=True))
        self.visible += names
        if family == "contractions" or self.products & set(operands):
            self.products |= set(names)
        self.body.append(dataclasses.replace(let, types=tuple(types)))
        return True

    def step(self, families: dict[str, float] = WEIGHTS) -> bool:
        """Tries to add one random statement."""
        names = list(families)
        family = self.choice(names, [families[name] for name in names])
        samplers = OPERATIONS[family]
        sampler, _ = self.choice(samplers, [weight for _, weight in samplers])
        before = len(self.body), list(self.visible)
        try:
            if self.let(sampler(self), family):
                return True
        except NoOperand:
            pass
        del self.body[before[0] :]
        self.visible = before[1]
        return False

    def steps(self, count: int) -> None:
        for _ in range(4 * count):
            if count <= 0:
                break
            count -= self.step()

    def define(
        self,
        params: Sequence[ArrayType],
        results: Sequence[ArrayType] | None,
        steps: int,
        captures: bool = True,
        scope: str = "",
    ) -> tuple[Def, list[ArrayType]]:
        """Draws a function, by default of one result of any float type.

        With ``captures`` it may read values of the program around it.
        """
        if self.depth >= 3:
            raise NoOperand
        outer_visible, outer_body = self.visible, self.body
        names = tuple(self.fresh() for _ in params)
        self.types.update(zip(names, params, strict=True))
        self.visible = [n for n in outer_visible if captures and self.chance(0.5)] + list(names)
        self.body = []
        self.depth += 1
        try:
            self.steps(steps)
            if results is None:
                found = [self.floats()]
                types = [self.types[found[0]]]
            else:
                types = list(results)
                found = [self._returned(t, names) for t in types]
            body = tuple(self.body)
        finally:
            self.depth -= 1
            self.visible, self.body = outer_visible, outer_body
        result = f"({', '.join(found)},)" if len(found) > 1 else found[0]
        self.counter += 1
        return Def(f"f{self.counter}", names, body, result, tuple(params), scope), types

    def _returned(self, want: ArrayType, params: tuple[str, ...]) -> str:
        """A value of the type that a function must return, computed by it if possible."""
        computed = [n for let in self.body for n in let.names]
        exact = [n for n in computed if self.types[n] == want]
        if exact and self.chance(0.9):
            return exact[-1]
        castable = [n for n in computed if self.types[n].dtype in FLOATS + COMPLEX + INTS]
        if want.dtype.startswith("key") or not (castable or params):
            return self.choice([n for n in self.visible if self.types[n] == want])
        source = castable[-1] if castable else self.choice(self.visible)
        if not self.let(self.fitted(source, want), "casts"):
            raise NoOperand
        if self.types[self.visible[-1]] != want:
            raise NoOperand
        return self.visible[-1]


def _bound(d: Def) -> set[str]:
    names = set(d.params)
    for let in d.body:
        names |= set(let.names)
        for inner in let.defs:
            names |= _bound(inner)
    return names


def abstract(t: ArrayType) -> jax.ShapeDtypeStruct:
    dtype = jax.random.key(0).dtype if t.dtype.startswith("key") else jnp.dtype(t.dtype)
    return jax.ShapeDtypeStruct(t.shape, dtype, weak_type=t.weak)


def type_of(aval: Any) -> ArrayType:
    name = "key" if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else np.dtype(aval.dtype).name
    return ArrayType(tuple(aval.shape), name, bool(getattr(aval, "weak_type", False)))


def _inputs(g: Generator) -> tuple[tuple[str, ...], tuple[str, ...]]:
    params, data = [], []
    for _ in range(g.integer(1, 3)):
        params.append(_input(g, ("float32", "bfloat16", "float16"), (12, 1, 1)))
    dtypes = ["float32", "float16", "bfloat16", "int32", "bool", "complex64", "int8", "key"]
    odds = [14.0, 1, 1, 2, 1, 0.5, 0.3, 1]
    if g.x64:
        dtypes += ["float64", "complex128", "int64"]
        odds += [3, 0.5, 1]
    for _ in range(g.integer(1, 4)):
        data.append(_input(g, dtypes, odds))
    return tuple(params), tuple(data)


def _input(g: Generator, dtypes: Sequence[str], odds: Sequence[float]) -> str:
    dtype = g.choice(dtypes, odds)
    shape = () if dtype == "key" else g.shape()
    name = g.fresh()
    weak = dtype == "float32" and not shape and g.chance(0.4)
    if weak and g.x64:
        dtype = "float64"  # as a Python float
    g.types[name] = ArrayType(shape, dtype, weak)
    g.visible.append(name)
    return name


def generate(seed: Any, size: tuple[int, int] = (3, 9)) -> Program:
    """Draws a program; ``size`` is the least and the largest number of statements at the top."""
    g = Generator(seed)
    with jax_settings(g.x64):
        params, data = _inputs(g)
        if g.chance(0.12):
            for _ in range(4):
                g.step({"probes": 1})
        else:
            if g.chance(0.7):
                g.step({"contractions": 1})
            g.steps(g.integer(*size))
            if g.chance(0.2):
                g.step({"probes": 1})
    types = {name: g.types[name] for name in (*params, *data)}
    body = tuple(g.body)
    made = [name for let in body for name in let.names]
    read = {name for let in body for name in let.reads()}
    sinks = [name for name in made if name not in read][-4:]
    outputs = sinks + [name for name in made if name not in sinks and g.chance(0.1)]
    if g.chance(0.05):
        outputs.append(g.choice(params + data))
    return pruned(Program(params, data, types, body, tuple(outputs or data[:1]), g.x64))
