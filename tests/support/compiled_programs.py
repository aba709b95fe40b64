"""A program that several tests compile is compiled once in a run."""

import os
import tempfile

import jax

_FOLDER = "JMP_AUTOCAST_COMPILED_PROGRAMS"


def keep_programs() -> tempfile.TemporaryDirectory | None:
    """Lets JAX write what it compiles to a folder that lasts as long as the run, and read it there.

    Tests check a rewritten program against the plain one, and small eager programs are the same in
    many tests: of the 432 programs that `loops/test_carries.py`, `loops/test_loop_constants.py` and
    `loss_scaling/test_gradients.py` compile, 144 are different. JAX finds a program by its text and
    the compiler's options, so what is compiled otherwise is compiled anew. It has to be called
    before anything is compiled: JAX asks for the folder once.

    Returns:
        The folder, to be kept until the run ends; None where another process has made it.
    """
    made = None
    if _FOLDER not in os.environ:
        made = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
        os.environ[_FOLDER] = made.name
    # One for each process: JAX writes a file in place, and another process may read half of it.
    folder = os.path.join(os.environ[_FOLDER], str(os.getpid()))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return made
