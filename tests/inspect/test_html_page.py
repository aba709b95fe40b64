"""The HTML page of `explain`: its content, its links, and no scripts."""

import collections
import html

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, explain
from tests.support.html_pages import read_page

from .test_links import gpt_block

W = np.ones((8, 8), np.float32)
X = np.ones((8, 8), np.float32)
PARAMS = {"w": W}


def transformer(params, x):
    with jax.named_scope("layers"):
        h, sums = lax.scan(lambda h, _: (gpt_block(params["w"], h), jnp.sum(h)), x, None, 3)
    with jax.named_scope("head"):
        h = lax.cond(jnp.sum(sums) > 0, lambda h: h @ params["w"], lambda h: jnp.exp(h), h)
        return jnp.mean(jnp.log(jax.nn.sigmoid(h @ params["w"])))


PROGRAMS = {
    "forward": (transformer, BF16),
    "gradient": (jax.grad(transformer), BF16),
    "no equation": (lambda params, x: x, BF16),
}


@pytest.fixture(scope="module")
def reports():
    return {name: explain(fn, PARAMS, X, policy=policy) for name, (fn, policy) in PROGRAMS.items()}


def equations(page):
    return [tr for tr in page.all("tr") if "id" in tr.attributes]


def cells(row):
    return list(row.all("td"))


def links(element):
    return [int(a.attributes["href"].removeprefix("#equation-")) for a in element.all("a")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_shows_every_program(reports, name, tmp_path):
    report, path = reports[name], tmp_path / "report.html"
    text = report.to_html(path)
    assert path.read_text("utf-8") == text
    page = read_page(text)
    assert page.first("h1").text == report.name
    assert report.summary in page.first("header").text
    facts = zip(page.first("dl").all("dt"), page.first("dl").all("dd"), strict=True)
    assert dict((dt.text, dd.text) for dt, dd in facts) == {
        line[:12].rstrip(): line[12:] for line in report._facts()
    }
    assert [row.attributes["id"] for row in equations(page)] == [
        f"equation-{row.index}" for row in report.rows
    ]
    for row, tr in zip(report.rows, equations(page), strict=True):
        number, primitive, operands, results, reason, _, source = cells(tr)
        assert number.text == str(row.index)
        assert primitive.text.split()[0] == row.primitive
        assert [n for n in row.operand_rows if n is not None] == links(operands)
        assert results.text.count("[") == len(row.results)
        assert reason.text.startswith(row.reason)
        assert source.text == row.source
    scopes = [scope.text for scope in page.all("summary")]
    assert all(any(s.startswith(row.scope or "(no scope)") for s in scopes) for row in report.rows)


@pytest.mark.parametrize("name", ["forward", "gradient"])
def test_a_reason_has_links_to_its_text_and_to_producers(reports, name):
    page = read_page(reports[name].to_html())
    ids = collections.Counter(e.attributes["id"] for e in page.all() if "id" in e.attributes)
    assert set(ids.values()) == {1}
    assert {a.attributes["href"][1:] for a in page.all("a")} <= ids.keys()
    for row in reports[name].rows:
        reason, *producers = cells(page.first("tr", id=f"equation-{row.index}"))[4].all("a")
        assert page.first("dt", id=reason.text).text == reason.text == row.reason
        expected = {row.operand_rows[i] for i in row.cause_operands} - {None}
        assert {int(a.text.removeprefix("#")) for a in producers} == expected


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</style><!--{{rows}}{{style}}",
    "&lt;b&gt; &amp;",
    "",
]


def hostile_report(name):
    def fn(params, x):
        with jax.named_scope(name), jax.named_scope("inner"):
            return jnp.exp(x @ params[name])

    fn.__name__ = name or "empty"
    return explain(fn, {name: W}, X, policy=BF16.with_rules({"*": "float32"}, scope=f"{name}x"))


@pytest.mark.parametrize("name", HOSTILE, ids=[f"name{i}" for i in range(len(HOSTILE))])
def test_a_hostile_name_is_text(name):
    report = hostile_report(name)
    text = report.to_html()
    text.encode("utf-8")
    page = read_page(text)
    assert {e.tag for e in page.all()}.isdisjoint({"script", "img", "iframe", "object", "embed"})
    assert not [e for e in page.all() if any(each.startswith("on") for each in e.attributes)]
    assert len(equations(page)) == len(report.rows)
    if name:
        assert page.first("h1").text == report.name
        assert f"0/{name}" in cells(equations(page)[0])[2].text


def test_a_page_loads_nothing(reports):
    page = read_page(reports["forward"].to_html())
    assert not [e for e in page.all() if "style" in e.attributes or "src" in e.attributes]
    assert {e.attributes["href"] for e in page.all("link")} == {"data:,"}


def test_the_frame_of_a_notebook_shares_nothing_with_it(reports):
    report = reports["forward"]
    (frame,) = read_page(report._repr_html_()).all("iframe")
    assert frame.attributes["sandbox"] == ""
    assert html.unescape(frame.attributes["srcdoc"]) == html.unescape(report.to_html())
