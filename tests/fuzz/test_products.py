"""Random products and convolutions: `python -m tests.fuzz.products` runs more of them."""

import pytest

from .products import failures


@pytest.mark.parametrize("seed", range(40))
def test_a_random_product_has_the_digits_of_float32_accumulation(seed):
    assert not failures(seed)
