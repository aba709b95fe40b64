"""Chains of sums and of factors keep what their layers do, at the default level; see `chains`."""

import pytest

from .chains import LAYERS, Chain, errors

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
    found = errors(chain, ["written out", "scanned"])
    assert max(found.values()) <= chain.bound, found
