"""Programs of a thread are lowered in one MLIR context."""

import threading

from jax._src.interpreters import mlir

# A context keeps the constants of what was lowered in it.
_LIMIT = 500


class _Own(threading.local):
    context = None
    programs = 0


def keep_contexts() -> None:
    """Lets JAX lower its programs in a context that is there.

    JAX makes one for each program and loads all dialects into it. That takes 5 ms, which is most of
    the time for lowering a small program: 138 tests of closures, lookups and gradients took 20 %
    longer. What a program is lowered to does not depend on the context.
    """
    make, own = mlir.make_ir_context, _Own()

    def make_ir_context():
        if mlir.ir.Context.current is not None:
            return make()  # a program that is lowered while another one is stands in no other
        if own.context is None or own.programs == _LIMIT:
            own.context, own.programs = make(), 0
        own.programs += 1
        return own.context

    mlir.make_ir_context = make_ir_context
