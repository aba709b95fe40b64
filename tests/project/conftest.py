"""Pages, examples and benchmarks run here in the process of the tests, as programs of users."""

import pytest

from tests.support.settings import as_found


@pytest.fixture(autouse=True)
def process_as_found():
    """What a page or an example sets ends with its test, also where it fails."""
    with as_found():
        yield
