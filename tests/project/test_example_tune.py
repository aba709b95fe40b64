"""The example that tunes a policy: float16 fails, and what it finds trains."""

import math
import struct

import numpy as np
import pytest

from jmp_autocast import Policy
from tests.support.examples import load

TINY = "--blocks 2 --loud 1 --width 8 --batch-size 8 --steps 40".split()

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.fixture(scope="module")
def example():
    return load("tune_policy")


def test_it_trains_with_the_policy_and_not_without(example, tmp_path, capsys):
    result = example.main([*TINY, "--output", str(tmp_path / "new" / "folder")])
    assert {each.scope for each in result.report.kept} == {"block_1/gate"}
    assert (result.report.error_before, result.report.share_after) == (math.inf, 1.0)
    policy, picture = result.files
    assert Policy.load(policy) == result.report.policy
    assert not np.isfinite(result.losses["float16"]).any()
    assert result.skipped["float16"] == 40
    full, tuned = result.losses["float32"], result.losses["tuned"]
    assert np.mean(full[-5:]) < 0.8 * np.mean(full[:5])
    # The first scales of the loss may be too large for a step or two.
    assert result.skipped["tuned"] <= 2
    assert np.mean(tuned[-5:]) == pytest.approx(np.mean(full[-5:]), rel=0.2)
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert (width, height) == (960, 540)
    text = capsys.readouterr().out
    assert "1 of" in text
    assert "train in tuned" in text
    assert "float16  last loss nan, 40 steps skipped" in text
    assert all(str(path) in text for path in result.files)
