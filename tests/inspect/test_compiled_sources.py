"""What `explain_compiled` takes: functions, what JAX lowered or compiled, texts and files."""

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import explain_compiled
from jmp_autocast.inspect.compiled import sources, targets
from jmp_autocast.inspect.compiled.hlo import UnreadableError
from jmp_autocast.inspect.compiled.sources import platform_of
from tests.support.hlo_texts import TEXTS

X, W = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
LOWERED = jax.jit(jnp.matmul).lower(X, W)
COMPILED = LOWERED.compile()


def test_all_that_is_taken_gives_one_report(tmp_path):
    path = tmp_path / "module_0001.jit_matmul.cpu_after_optimizations.txt"
    path.write_text(COMPILED.as_text(), "utf-8")
    first = explain_compiled(COMPILED)
    assert first.memory.arguments == 4 * (8 * 16 + 16 * 4)
    for program, args in ((jnp.matmul, (X, W)), (jax.jit(jnp.matmul), (X, W)), (LOWERED, ())):
        found = explain_compiled(program, *args)
        assert (found.by_dtype(), found.memory, found.platform) == (
            first.by_dtype(),
            first.memory,
            "cpu",
        )
    for program in (COMPILED.as_text(), path, str(path), tmp_path):
        found = explain_compiled(program)
        assert (found.by_dtype(), found.memory) == (first.by_dtype(), None)
    assert explain_compiled(path).platform == "cpu"
    assert "unknown: the text does not say" in str(explain_compiled(path))


def test_options_of_the_compiler_are_those_of_jit():
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        explain_compiled(jnp.sin, X, compiler_options={"no_such_option": True})


def test_the_buffer_assignment_beside_a_text_says_its_memory(tmp_path):
    stem = "module_0001.jit_matmul.cpu_after_optimizations"
    (tmp_path / f"{stem}.txt").write_text(COMPILED.as_text(), "utf-8")
    (tmp_path / f"{stem}-buffer-assignment.txt").write_text(
        "BufferAssignment:\n"
        "allocation 0: size 512, parameter 0, shape |f32[8,16]| at ShapeIndex {}:\n"
        " value: <1 x @0> (size=512,offset=0): f32[8,16]{1,0}\n"
        "allocation 1: size 256, parameter 1, shape |f32[16,4]| at ShapeIndex {}:\n"
        "allocation 2: size 128, output shape is |f32[8,4]|, maybe-live-out:\n"
        "allocation 3: size 64, preallocated-temp:\n",
        "utf-8",
    )
    memory = explain_compiled(tmp_path / f"{stem}.txt").memory
    assert (memory.temporary, memory.arguments, memory.results) == (64, 768, None)


def test_the_compiler_is_known_by_its_text():
    kept = {path.stem: platform_of(path.read_text("utf-8")) for path in TEXTS.glob("*.txt")}
    assert len(kept) == 4
    assert all(name.startswith(platform) and platform for name, platform in kept.items())
    assert platform_of("HloModule m") == ""


class Mute:
    """What jaxlib 0.10 makes for a v6e."""

    def as_text(self):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: cannot print")


def test_what_xla_cannot_print_is_to_be_dumped():
    with pytest.raises(UnreadableError, match=r"cannot print\. .*xla_dump_to"):
        sources._of_compiled(Mute())


class Silent:
    """A compiled program of a backend that tells nothing."""

    input_shardings = output_shardings = ()

    def as_text(self):
        return None

    def memory_analysis(self):
        return None


def test_a_backend_that_tells_nothing():
    assert sources._of_compiled(Silent()) == ("", "", None)


# --- devices that are not there -----------------------------------------------------------------


def test_a_function_is_compiled_for_the_device_that_is_named(monkeypatch):
    """With the CPU in the place of one that is not there: what is not installed cannot compile."""
    asked = []
    monkeypatch.setattr(
        targets, "devices", lambda *args: asked.append(args) or jax.local_devices(backend="cpu")
    )
    monkeypatch.setattr(targets, "GPU_OPTIONS", {})
    for device in ("v5e:4x4", "H100"):
        report = explain_compiled(lambda x, k: x * k, jnp.ones(8), 2, device=device)
        assert report.kernels == 1
    assert asked == [("v5e", 1, "4x4"), ("h100", 1, None)]


@pytest.mark.parametrize(("target", "topology"), [("v5e", "2x2"), ("v5e", "4x4"), ("h100", None)])
def test_devices_are_described_by_the_compiler(target, topology, monkeypatch):
    described = []

    def describe(**given):
        described.append(given)
        return type("Topology", (), {"devices": ["one", "two"]})

    monkeypatch.setattr(targets, "check_installed", lambda target: None)
    monkeypatch.setattr(targets, "private", lambda name: describe)
    targets.devices.cache_clear()
    try:
        assert targets.devices(target, 1, topology) == ["one"]
        if target in targets.TPUS:
            with pytest.raises(ValueError, match="No topology of v5e with 3 chips"):
                targets.devices(target, 3)
    finally:
        targets.devices.cache_clear()
    (given,) = described
    if target == "h100":
        assert "NVIDIA H100" in given["target_config"]
    else:
        assert given == {"platform": "tpu", "topology_name": f"v5e:{topology}"}


def test_a_plugin_that_looks_for_a_gpu_says_how_to_start(monkeypatch):
    def describe(**given):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(targets, "check_installed", lambda target: None)
    monkeypatch.setattr(targets, "private", lambda name: describe)
    targets.devices.cache_clear()
    with pytest.raises(UnreadableError, match=r"device='b200'.*not loaded.*JAX_PLATFORMS=cpu"):
        explain_compiled(jnp.sin, X, device="b200")


def test_a_compiler_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    for device, extra in (("v5p", "bench-tpu"), ("a100", "bench-gpu")):
        targets.devices.cache_clear()
        with pytest.raises(UnreadableError, match=rf"device='{device}'.*not installed.*{extra}"):
            explain_compiled(jnp.sin, X, device=device)
