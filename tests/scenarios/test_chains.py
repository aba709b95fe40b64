"""Chains of sums and of factors keep what their layers do, at the default level; see `chains`."""

import pytest

from .chains import LAYERS, SUMS, Chain, row

# A row of each kind, and each other dimension once.
ROWS = [
    *[Chain(name, 1e-2, 8, "product", "bfloat16") for name in LAYERS],
    Chain("LayerScale", 1e-5, 8, "table", "bfloat16"),
    Chain("LayerScale", 1e-3, 24, "product", "float16"),
    Chain("Euler", 1e-4, 8, "input", "float16"),
    Chain("plain", 1.0, 24, "input", "bfloat16"),
]


@pytest.mark.parametrize("chain", ROWS, ids=str)
def test_a_chain_is_as_exact_written_out_as_scanned(chain):
    found = row(chain, ["written out", "scanned"])
    assert max(found.errors.values()) <= found.bound, found.text()


@pytest.mark.parametrize("name", ["LayerScale", "Euler", "plain"])
def test_the_level_compute_rounds_as_casts_by_hand(name):
    found = row(Chain(name, 1.0, 8, "product", "bfloat16", "compute"), ["written out", "scanned"])
    assert name in SUMS
    assert max(found.errors.values()) <= 2 * found.by_hand, found.text()
