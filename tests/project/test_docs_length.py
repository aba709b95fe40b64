"""The documentation stays short enough to be read."""

import re

from tests.support.markdown_pages import ROOT

# Words outside of programs, their output, and what is printed from the code, as the reference is.
SITE, CHANGELOG, README_BYTES = 28_000, 600, 6_000
REFERENCE = {"primitives.md", "reasons.md", "pytorch_differences.md"}


def words(text):
    for printed in (r"^(`{3,}).*?^\1\s*$", r"^<!-- \w+ -->$.*?^<!-- end -->$"):
        text = re.sub(printed, "", text, flags=re.M | re.S)
    return len(re.findall(r"\S*\w\S*", text))


def pages():
    docs = ROOT / "docs"
    for path in sorted(docs.rglob("*.md")):
        parts = path.relative_to(docs).parts
        if "_build" not in parts and parts[0] != "reference" and path.name not in REFERENCE:
            yield path


def test_the_site_can_be_read():
    counted = {str(path): words(path.read_text(encoding="utf-8")) for path in pages()}
    longest = sorted(counted.items(), key=lambda item: -item[1])[:10]
    assert sum(counted.values()) <= SITE, longest


def test_the_first_pages_are_short():
    assert words((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) <= CHANGELOG
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES
