"""The committed recording: what is a change of dtypes, and in which process a plan is the same."""

import json
import os
import subprocess
import sys

import pytest

from .compare import changed_lines, differing
from .contract import RECORDING
from .record import ABOUT, read, recorded_sources

OLD = """\
dot_general bfloat16 bfloat16 -> bfloat16 | LOWER_PRECISION |
exp float32 -> float32 | FP32 |"""
OTHER_REASON = OLD.replace("FP32", "FEEDER")
OTHER_DTYPE = OLD.replace("exp float32 -> float32 | FP32", "exp bfloat16 -> bfloat16 | PROMOTE_LOW")


def test_another_reason_is_no_other_dtype():
    before, same, other = ({"plan": text} for text in (OLD, OTHER_REASON, OTHER_DTYPE))
    assert not differing(before, same, dtypes=True)
    assert differing(before, same)
    assert list(differing(before, other, dtypes=True)) == ["plan"]
    assert list(changed_lines(OLD, OTHER_DTYPE)) == [
        "-exp float32 -> float32 | FP32 |",
        "+exp bfloat16 -> bfloat16 | PROMOTE_LOW |",
    ]


def test_a_recording_is_committed():
    about = json.loads((RECORDING / ABOUT).read_text(encoding="utf-8"))
    assert {"python", "jax", "flax"} <= about.keys()
    programs = sum(len(read(RECORDING, source)) for source in recorded_sources([RECORDING]))
    assert programs > 600
    assert sum(path.stat().st_size for path in RECORDING.iterdir()) < 1_000_000


@pytest.mark.slow
@pytest.mark.process
def test_a_plan_is_the_same_whatever_the_seed_of_hashes(tmp_path):
    """The command fixes the seed: a program may be traced in the order of a set."""
    main = "import sys; from tests.corpus.__main__ import main; sys.exit(main(sys.argv[1:]))"
    only = "^(tuned|structures|custom_rules|benchmark_models|edges): "
    command = [sys.executable, "-c", main, "record", "--plans", "--quick", "--only", only]
    files = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        subprocess.run([*command, folder], env=environment, check=True, capture_output=True)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert len(files[0]) == 6
    assert files[0] == files[1]
