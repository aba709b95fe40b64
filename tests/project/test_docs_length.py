"""The first pages stay short enough to be read."""

import re

from tests.support.markdown_pages import ROOT

# Words outside of programs, their output, and what is printed from the code, as the reference is.
CHANGELOG, README_BYTES = 600, 6_000


def words(text):
    for printed in (r"^(`{3,}).*?^\1\s*$", r"^<!-- \w+ -->$.*?^<!-- end -->$"):
        text = re.sub(printed, "", text, flags=re.M | re.S)
    return len(re.findall(r"\S*\w\S*", text))


def test_the_first_pages_are_short():
    assert words((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) <= CHANGELOG
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES
