"""The five HTML pages, in a real browser: what each shows, and that it runs nothing else."""

import functools
import json
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_autocast import BF16, FP16, Policy, compare, explain, keep_less, tune
from jmp_autocast.inspect import explain_kept
from tests.support.report_pages import count, fits, page_opener  # noqa: F401 - the fixture `show`

SCOPE = "<script>alert(1)</script>"
W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 3
X = np.ones((4, 8), np.float32)
PARAMS = {"w": W, "ws": np.stack([W] * 3)}


def model(params, x):
    def layer(h, w):
        with jax.named_scope(SCOPE):
            return h + jax.nn.gelu(jax.nn.softmax(h @ w)), None

    h = jax.lax.scan(layer, x, params["ws"])[0]
    with jax.named_scope(SCOPE):
        return jnp.mean(jnp.square(100 * jnp.tanh(h @ params["w"])))


def energy(w, x):
    with jax.named_scope(SCOPE):
        return jnp.sqrt(jnp.square(x @ w) + 1.0)


def tuned():
    batches = [(np.eye(8, dtype=np.float32), 500 * X)]
    return tune(energy, batches=batches, policy=FP16, tolerance=0.01, progress=False, report=True)[
        1
    ]


def difference():
    careful = explain(model, PARAMS, X, policy=Policy(jnp.bfloat16, level="tensor_cores"))
    return explain(model, PARAMS, X, policy=BF16).difference(careful)


# The report; the texts of its page; for each table a column that sorts it, and its rows.
PAGES = {
    "explain": (
        lambda: explain(model, PARAMS, X, policy=BF16),
        [
            "Precision report",
            "Modules",
            "casts",
            "H100 SXM",
            "too small: a kernel takes",
            "instead of",
        ],
        {
            "Equations": ("FLOPs", lambda report: len(report.rows)),
            "Products on each device, at best": ("16 bits", lambda r: len(r.devices)),
            "What gains nothing by 16 bits": (
                *("16 bits", lambda r: sum(len(d.no_gain) for d in r.devices)),
            ),
        },
    ),
    "kept": (
        lambda: explain_kept(keep_less(model), PARAMS, X),
        ["Kept for the backward pass", "in each of 3 runs", "a contraction is never done again"],
        {
            "By scope, the most bytes first": ("bytes kept", lambda r: len(r.by_scope())),
            "Arrays that are kept, the largest first": ("times", lambda r: len(r.arrays)),
            "Computed again, in program order": ("FLOPs", lambda r: len(r.islands)),
        },
    ),
    "compare": (
        lambda: compare(model, PARAMS, X, policy=BF16, argnums=0),
        ["Comparison with float32", "error of cotangents", "0/ws", "dot_general"],
        {
            "By scope, in program order": ("introduced", lambda r: len(r.by_scope())),
            "Equations, the largest introduced error first": ("error", lambda r: len(r.rows)),
            "Cotangents, the largest introduced error first": (
                *("error", lambda r: len(r.cotangents)),
            ),
            "Gradients": ("of all", lambda r: len(r.gradients)),
        },
    ),
    "difference": (
        difference,
        ["Two policies", "bytes kept for the backward pass", "level='tensor_cores'"],
        {
            "What the program costs": ("total", lambda r: len(r.totals)),
            "Equations whose dtypes differ": ("primitive", lambda r: len(r.changes)),
        },
    ),
    "tune": (
        tuned,
        ["Tuned policy", "of matmuls and convolutions in float16", "square"],
        {
            "What the search found": ("what", lambda _: 2),
            "Kept in float32, in program order": ("largest", lambda r: len(r.kept)),
        },
    ),
}


@pytest.fixture(scope="module")
def reports():
    return functools.cache(lambda name: PAGES[name][0]())


@pytest.fixture(params=PAGES)
def page_of(request, reports):
    """A report, made once, with the texts and tables of its page."""
    return reports(request.param), *PAGES[request.param][1:]


def test_what_a_page_shows(show, page_of):
    report, texts, tables = page_of
    page = show(report, height=1500)
    assert report.name in page.inner_text("h1")
    assert report.summary in page.inner_text("#summary")
    shown = page.inner_text("body")
    assert SCOPE in shown
    assert not [text for text in texts if text.lower() not in shown.lower()]
    assert page.locator("script").count() == 2
    assert page.locator("[role=grid]").count() == len(tables)
    for title, (column, rows_of) in tables.items():
        card = page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))
        grid = card.locator("[role=grid]")
        rows = rows_of(report)
        assert rows
        assert f"{rows} " in card.locator(".card-head").last.inner_text()
        assert int(grid.get_attribute("aria-rowcount")) == rows + 1
        sort = grid.get_by_role("button", name=column, exact=True)
        key = sort.get_attribute("data-key")
        sort.click()
        order = grid.locator(f"th.{key}").get_attribute("aria-sort")
        assert order == ("ascending" if column in ("total", "primitive", "what") else "descending")


def test_a_screenshot_fits_the_window_and_has_many_colors(show, page_of):
    for width, height, scheme in ((1360, 900, "light"), (390, 800, "dark")):
        page = show(page_of[0], width=width, height=height, color_scheme=scheme)
        picture = page.screenshot()
        assert struct.unpack(">II", picture[16:24]) == (width, height)
        assert len(picture) > 15_000  # a page of one color has some 5,000 bytes
        assert fits(page)


def test_the_data_of_a_page_are_those_of_the_report(page_of):
    page = page_of[0].to_html()
    block = page.partition('<script id="data" type="application/json">')[2].partition("<")[0]
    assert json.loads(block)["summary"].startswith(page_of[0].summary)
    assert block.isascii()
    assert page_of[0]._repr_html_().count("<iframe") == 1


def test_a_table_is_searched_and_errors_have_bars(show, reports):
    comparison = reports("compare")
    page = show(comparison)
    shares = page.evaluate(
        "[...document.querySelectorAll('.row .cell.error')].map("
        "(cell) => [cell.innerText, parseFloat(cell.style.getPropertyValue('--share'))])"
    )
    assert {share for text, share in shares if text == "0"} == {0}
    assert all(0 < share <= 100 for text, share in shares if float(text) > 1e-7)
    card = page.locator(".card", has_text="Equations,").first
    card.locator("input").fill("DOT_general bfloat16")
    found = [r for r in comparison.rows if (r.primitive, r.computed) == ("dot_general", "bfloat16")]
    assert card.locator(".row").count() == len(found) > 1
    assert f"{len(found)} of {len(comparison.rows)} rows" in card.inner_text()


def test_the_picture_draws_each_value(show, reports):
    (cut,) = reports("kept").cuts
    page = show(reports("kept"))
    for kind, fate in {"kept": "kept", "again": "computed again", "unread": "not read"}.items():
        expected = sum(value.fate == fate for value in cut.values)
        assert page.locator(f".picture g.{kind}").count() == expected > 0


def test_the_first_picture_is_by_scope(show, reports):
    report = reports("kept")
    page = show(report)
    bars = page.locator(".picture").first.locator(".scope-bar")
    said = bars.locator("> title").all_text_contents()
    assert len(said) == len(report.by_scope()) > 1
    kept, again = next(iter(report.by_scope().values()))
    assert 0 < kept < 1000 < again
    assert f": {kept} B kept, {again / 1000:.2f} kB computed again" in said[0]


def test_a_long_cut_is_drawn_by_its_largest_values(show):
    def long(params, x):
        def layer(h, w):
            for k in range(250):
                h = jnp.sin(h) * 1.5 if k % 50 else jnp.sin(h @ w)
            return h, None

        return jnp.sum(jax.lax.scan(layer, x, params["ws"])[0])

    report = explain_kept(keep_less(long), PARAMS, X)
    (cut,) = report.cuts
    assert len(cut.values) > 400
    page = show(report)
    drawn = page.evaluate("data.cuts[0][3].map((value) => value.nbytes)")
    assert sorted(drawn) == sorted(value.nbytes for value in cut.values)[-400:]
    assert f"{len(cut.values) - 400} smaller values in JSON" in page.inner_text("body")


def test_a_collective_has_a_table(show):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(auto,))
    spec = jax.sharding.PartitionSpec("d")
    fn = jax.shard_map(
        lambda x: jax.lax.all_gather(x @ x.T, "d"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    page = show(explain(fn, jax.ShapeDtypeStruct((64, 64), np.float32), policy=BF16))
    card = page.locator(".card", has=page.get_by_role("heading", name="What each device sends"))
    assert card.locator(".row").all_inner_texts()[0].split("\t")[:3] == [
        *("all_gather", "bfloat16", "4"),
    ]


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
    policy = BF16.with_rules({"*": "float32"}, scope=f"{name}x")
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
