"""The HTML page of a report shows what a program says as text, runs nothing, asks for nothing."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, explain
from tests.support.report_pages import count, fits, page_opener  # noqa: F401 - the fixture `show`

W = np.ones((8, 8), np.float32)
X = np.ones((4, 8), np.float32)


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><!--<script>{{data}}{{script}}${alert(4)}`",
    "\u202egnp.exe\u2028\u2029\x00\ufeff\ud800",
    "name" * 5000,
    "__proto__",
    "&lt;b&gt; &amp;",
    "/",
    "",
]


def hostile_report(name):
    def fn(params, x):
        with jax.named_scope(name), jax.named_scope("inner"):
            return jnp.exp(x @ params[name])

    fn.__name__ = name or "empty"
    policy = BF16.with_scopes({f"{name}x": "float32"})
    return explain(fn, {name: W}, X, policy=policy)


@pytest.mark.parametrize("name", HOSTILE, ids=[f"name{i}" for i in range(len(HOSTILE))])
def test_a_hostile_name_is_text(show, name):
    report = hostile_report(name)
    page = show(report)
    assert count(page) == f"{len(report.rows)} equations"
    visible = page.evaluate("visible(data.name)")
    assert page.evaluate("find('name').textContent") == visible
    page.evaluate("openRow(0)")
    assert page.evaluate("rows[0].scope") == report.rows[0].scope
    assert page.evaluate("rows[0].operand_inputs") == list(report.rows[0].operand_inputs)
    assert page.locator("script").count() == 2
    assert page.locator("img, iframe, object, embed, a").count() == 0
    assert fits(page)
    page.set_viewport_size({"width": 400, "height": 800})
    assert fits(page)
    if "\u202e" in name:
        assert "⟨U+202E⟩" in visible


def test_the_data_cannot_leave_their_block():
    page = hostile_report("".join(HOSTILE)).to_html()
    block = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert not set(block[1]) & set("<>&\u2028\u2029")
    assert block[1].isascii()
    assert json.loads(block[1])["name"] == "".join(HOSTILE)
    assert page.count("<script") == page.count("</script>") == 2


def added(markup):
    return f"document.body.insertAdjacentHTML('beforeend', {json.dumps(markup)});"


INJECTED = {
    "a script": "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; "
    "document.body.append(s)",
    "a handler": added('<img src="data:," onerror="window.ran = 1">'),
    "a request": "fetch('https://example.com').catch(() => {})",
    "a frame": added('<iframe src="file:///etc/hostname"></iframe>'),
    "a form": added('<form id="sent" action="https://example.com"></form>')
    + "document.getElementById('sent').submit()",
}


@pytest.mark.parametrize("what", INJECTED)
def test_what_gets_in_nevertheless_does_nothing(show, visit, what):
    page = show(explain(jnp.sin, X, policy=BF16))
    page.evaluate(INJECTED[what])
    visit.expect("Content Security Policy")
    assert page.evaluate("window.ran") is None
    assert not any(problem.startswith("request:") for problem in visit.problems)


def test_the_frame_of_a_notebook(visit, tmp_path):
    frame = explain(jax.grad(lambda w, x: jnp.sum(jax.nn.softmax(x @ w)[0])), W, X)._repr_html_()
    assert frame.count("<iframe") == 1
    notebook = tmp_path / "notebook.html"
    style = "<style>h1, .row { display: none }</style>"
    head = "<!doctype html><meta charset=utf-8><link rel=icon href=data:,>"
    notebook.write_text(f"{head}{style}<h1>Notebook</h1>{frame}", encoding="utf-8")
    page = visit(notebook)
    inside = page.frame_locator("iframe")
    inside.locator("#row-3").click()
    assert inside.locator("#panel-title").inner_text().startswith("#3 ")
    assert inside.locator("h1").is_visible()
    assert page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    assert page.evaluate("typeof table") == "undefined"
