"""Texts of compiled modules: written by hand, compiled here, and kept of other compilers."""

import pathlib

import jax
import jax.numpy as jnp

from jmp_autocast.inspect.compiled.hlo import parse
from jmp_autocast.inspect.compiled.traffic import traffic

TEXTS = pathlib.Path(__file__).parents[1] / "inspect" / "compiled_texts"


def module_of(*lines, entry="...", before="", header=""):
    """The text of a module: an entry of these lines, and the computations before it."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule test{header}\n{before}\nENTRY %main ({entry}) -> f32[] {{\n{body}\n}}\n"


def read(text):
    """A parsed module and its traffic."""
    module = parse(text)
    return module, traffic(module)


def compiled_text(function, *shapes, dtype=jnp.float32):
    """What XLA:CPU makes of a function."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile().as_text()
