"""The whole suite runs under strict promotion, with tracer leaks and warnings as errors."""

import gc

import hypothesis
import jax
import pytest

from jmp_autocast.policies import registry
from tests.support.compiled_programs import keep_programs
from tests.support.cpu_float16 import excused
from tests.support.eager_operations import keep_compiled
from tests.support.mlir_contexts import keep_contexts
from tests.support.xla_flags import set_xla_flags

set_xla_flags(devices=8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_check_tracer_leaks", True)
keep_compiled()
keep_contexts()
keep_programs()

hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Without a path or a mark, the tests that take seconds each are left to `pytest tests`."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where XLA has no float16, its tests fail whatever the package does."""
    return excused(item, (yield))


@pytest.fixture(autouse=True)
def no_registration_stays(monkeypatch):
    """No registration of a test outlives it. A parameter of this name would take its place."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture(autouse=True)
def frozen_heap():
    """JAX collects garbage at each trace while leaks are checked.

    What imports and earlier tests left alive need not be visited each time. Frozen before each
    module alone, 143 tests of gradients and custom rules took 24.5 CPU seconds in place of 17.5.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def jit_caches():
    """For tests that trace much: while leaks are checked, JAX traces anew what it has traced."""
    with jax.check_tracer_leaks(False):
        yield


@pytest.fixture
def standard_promotion():
    """For tests of libraries that add values of several dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def float64():
    """For tests of programs of 64 bits."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def as_users_run_it():
    """With JAX's own defaults, for tests that run many steps."""
    with jax.check_tracer_leaks(False), jax.numpy_dtype_promotion("standard"):
        yield
