"""What `tune` reports, shows and logs, and that a search that was stopped goes on."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from jmp_autocast import BF16, FP16, tune
from jmp_autocast.inspect import TuneReport
from tests.support.tune_programs import (
    EYE,
    X,
    big_square,
    in_cond,
    in_scan,
    pins,
    tuned,
)

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_the_report(tmp_path, capsys):
    policy = tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01)
    printed = capsys.readouterr().out
    again, report = tuned(in_scan, [(X,)], tolerance=0.01)
    assert printed == f"{report}\n"
    assert policy == again == report.policy
    assert isinstance(report, TuneReport)
    assert all(len(line) <= 100 for line in printed.splitlines())
    assert "in_scan: 1 of" in printed
    assert "inf before" in printed
    assert "loop/step, " in printed
    assert capsys.readouterr().out == ""
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text("utf-8") == text
    data = json.loads(text)
    assert data["error_before"] == "inf"
    assert data["kept"][0]["primitive"] == "square"
    assert data["kept"][0]["largest"] == pytest.approx(72900)


def test_a_search_leaves_nothing_with_the_function():
    def model(x):
        return big_square(x) @ EYE

    before = dict(vars(model))
    tune(model, batches=[(X,)], policy=FP16, tolerance=0.01, progress=False)
    assert vars(model) == before


def lines_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


CULPRITS = (3, 11, 17)


def loud_blocks(x):
    """Overflows a float16 in some blocks; magnitudes elsewhere are as large, without harm."""
    for i in range(20):
        big = 600.0 if i in CULPRITS else 100.0
        with jax.named_scope(f"block_{i}"):
            x = jnp.sqrt(jnp.square((x @ EYE) * big) + 1.0) * (1.0 / big)
    return x


def search(log, limit=None):
    """Searches on, up to so many trials; returns the policy, the report, and its trials."""
    calls = []

    def accept(mixed):
        if len(calls) == limit:
            raise KeyboardInterrupt
        assert len(log.read_bytes().splitlines()) > len(calls)  # what a kill would leave
        calls.append(mixed)
        return jnp.isfinite(mixed(X)).all()

    return *tuned(loud_blocks, [(X,)], accept=accept, log=log), len(calls)


def test_a_search_that_was_interrupted_goes_on(tmp_path):
    log, whole = tmp_path / "stopped.jsonl", tmp_path / "whole.jsonl"
    with pytest.raises(KeyboardInterrupt):
        search(log, 6)
    with log.open("ab") as file:
        file.write(b'{"kept": [1, 2')  # what a process leaves that is killed while it writes
    policy, report, calls = search(log)
    expected, expected_report, expected_calls = search(whole)
    assert policy == expected
    assert report == expected_report
    assert calls == expected_calls - 6
    assert lines_of(log) == lines_of(whole)
    assert pins(report) == [(f"block_{i}", "square") for i in CULPRITS]
    assert search(log)[1:] == (report, 0)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01, log=path, progress=False)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tolerance=0.1), "its tolerance is 0.01, but here it is 0.1"),
        (dict(policy=BF16), "its policy is"),
        (dict(batches=[(X,), (X,)]), "its batches is"),
        (dict(fn=in_cond), 'its function is "in_scan", but here it is "in_cond"'),
        (dict(accept=lambda mixed: True, tolerance=None), "its tolerance is 0.01"),
    ],
    ids=["tolerance", "policy", "batches", "function", "accept"],
)
def test_the_log_of_another_search(log, change, message):
    options = dict(fn=in_scan, batches=[(X,)], policy=FP16, tolerance=0.01, log=log) | change
    before = log.read_bytes()
    with pytest.raises(ValueError, match=r"log=.*is of another search") as caught:
        tune(progress=False, **options)
    assert message in str(caught.value)
    assert "Pass another path" in str(caught.value)
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[]",
        "1",
        '{"kept": [0]}',
        '{"kept": [999], "passed": true, "error": 0.1}',
        '{"kept": [0], "passed": "yes", "error": 0.1}',
        '{"kept": 0, "passed": true, "error": 0.1}',
        '{"largest": [1.0]}',
        '{"largest": null}',
    ],
)
def test_a_line_that_is_no_trial(log, line):
    first, *rest = log.read_text("utf-8").splitlines(keepends=True)
    content = "".join([first, f"{line}\n", *rest])
    log.write_text(content, "utf-8")
    with pytest.raises(ValueError, match=r"log=.*line 2 is not a trial of tune. Delete the line"):
        tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01, log=log, progress=False)
    assert log.read_text("utf-8") == content


@pytest.mark.parametrize("content", [b"version = 1", b"{}\n", b"\xff\x00", b"\n"])
def test_a_file_that_is_no_log_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a log of tune, and stays unchanged"):
        tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01, log=path, progress=False)
    assert path.read_bytes() == content


@pytest.mark.parametrize("length", [0, 1, 20, 30, 100])
def test_a_first_line_that_is_torn_is_written_again(log, length):
    whole = log.read_bytes()
    log.write_bytes(whole[:length])
    tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01, log=log, progress=False)
    assert log.read_bytes() == whole


def test_a_progress_bar(capsys):
    tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01, progress=True)
    captured = capsys.readouterr()
    assert "in_scan: 1 of" in captured.out
    assert "in_scan" not in captured.err


def test_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"progress=True needs rich: pip install rich"):
        tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01, progress=True)
    tune(in_scan, batches=[(X,)], policy=FP16, tolerance=0.01)  # no terminal, no progress bar
    assert capsys.readouterr().err == ""
