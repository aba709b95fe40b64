"""Operations outside `jit` are compiled once, although tracer leaks are checked."""

import functools

from jax._src import dispatch


def keep_compiled() -> None:
    """Lets JAX keep the compiled form of each eager operation while it checks tracer leaks.

    With ``jax_check_tracer_leaks`` JAX forgets most of what it has traced, since a function of the
    user has to run again for a leak to show. That takes in `xla_primitive_callable`, which holds
    the compiled form of a single operation: each ``x + y`` outside `jit` then compiles anew, in
    18 ms. That was half of the suite's time. No function of a user is traced there, so nothing can
    leak there, and this cache may stay.
    """
    make = dispatch.xla_primitive_callable.__wrapped__
    # What it makes is a jitted function, which knows the modes of JAX apart by itself.
    dispatch.xla_primitive_callable = functools.lru_cache(4096)(make)
