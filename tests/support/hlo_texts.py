"""Texts of compiled modules: written by hand, compiled here, and kept of other compilers."""

import pathlib

import jax
import jax.numpy as jnp

from jmp_autocast.inspect.compiled.hlo import parse
from jmp_autocast.inspect.compiled.products import products
from jmp_autocast.inspect.compiled.runs import runs

TEXTS = pathlib.Path(__file__).parents[1] / "inspect" / "compiled_texts"


def module_of(*lines, entry="...", before="", header=""):
    """The text of a module: an entry of these lines, and the computations before it."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule test{header}\n{before}\nENTRY %main ({entry}) -> f32[] {{\n{body}\n}}\n"


def read(text):
    """A parsed module and what runs in it; of a conditional the branch of the largest results."""
    module = parse(text)
    return module, list(runs(module, lambda run: run.instruction.nbytes))


def instructions_of(module):
    """All instructions of a module, each once, including those inside fusions and loops."""
    return [i for c in module.computations.values() for i in c.values()]


def products_of(text, platform=""):
    """The products of a text."""
    module, found = read(text)
    return [product for run in found for product in products(run, module, platform)]


def compiled_text(function, *shapes, dtype=jnp.float32):
    """What XLA:CPU makes of a function."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile().as_text()
