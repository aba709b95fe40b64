"""A program that several tests compile is compiled once in a process."""

import collections

import jax
from jax._src import cache_key, compiler

# Executables hold memory; a program is mostly compiled again in the module where it was first.
_LIMIT = 2000


def keep_programs() -> None:
    """Lets JAX find what it has compiled by the text of the program and the compiler's options.

    Tests check a rewritten program against the plain one, and small eager programs are the same in
    many tests: of the 432 programs that `loops/test_carries.py`, `loops/test_loop_constants.py` and
    `loss_scaling/test_gradients.py` compile, 144 are different. The key is that of JAX's persistent
    cache, so what is compiled otherwise is compiled anew. That cache itself writes files: it took
    3 ms for each program, which is a fifth of what compiling the programs took.
    """
    compile_program = compiler.compile_or_get_cached
    kept: collections.OrderedDict[tuple, object] = collections.OrderedDict()

    def compile_once(backend, computation, devices, options, host_callbacks, *more, **named):
        compile_it = lambda: compile_program(
            backend, computation, devices, options, host_callbacks, *more, **named
        )
        # A callback belongs to one executable. A persistent cache has its own rules.
        if host_callbacks or jax.config.jax_compilation_cache_dir is not None:
            return compile_it()
        text = cache_key.get(computation, devices, options, backend)
        key = (backend, tuple(device.id for device in devices.flat), text)
        if key not in kept:
            kept[key] = compile_it()
        kept.move_to_end(key)
        if len(kept) > _LIMIT:
            kept.popitem(last=False)
        return kept[key]

    compiler.compile_or_get_cached = compile_once
