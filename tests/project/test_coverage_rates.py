"""The check of the two coverage rates that ends the continuous integration."""

import json

import pytest

from .coverage_rates import main


@pytest.mark.parametrize(
    ("lines", "branches", "status"),
    [(1000, 100, 0), (950, 90, 0), (949, 100, 1), (1000, 89, 1), (900, 80, 1)],
    ids=["all", "just_enough", "lines", "branches", "both"],
)
def test_each_rate_has_a_bound_of_its_own(tmp_path, capsys, lines, branches, status):
    totals = {
        "covered_lines": lines,
        "num_statements": 1000,
        "covered_branches": branches,
        "num_branches": 100,
    }
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"totals": totals}))
    assert main([str(report)]) == status
    line, branch = capsys.readouterr().out.splitlines()
    assert line.startswith(f"line coverage {lines / 10:.2f} % ({lines} of 1000;")
    assert branch.startswith(f"branch coverage {branches:.2f} % ({branches} of 100;")
    assert ("TOO LOW" in line, "TOO LOW" in branch) == (lines < 950, branches < 90)
