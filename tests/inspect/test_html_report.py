"""The HTML page of a report, in a real browser: it shows, filters, follows reasons, stays quiet."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_autocast import BF16, explain, explain_compiled
from jmp_autocast.inspect import CompiledProduct, PlannedAndMade
from tests.support.report_pages import count, fits, page_opener  # noqa: F401 - the fixture `show`

from .test_links import follow

W = np.ones((8, 8), np.float32)
X = np.ones((8, 8), np.float32)
PARAMS = {"w": W, "ws": np.stack([W] * 3)}


def transformer(params, x):
    def layer(h, w):
        with jax.named_scope("attention"):
            scores = jax.nn.softmax(h @ w @ h.T / jnp.sqrt(8.0))
            h = h + scores @ h
        with jax.named_scope("mlp"):
            return h + jnp.tanh(h @ w), jnp.sum(h)

    with jax.named_scope("layers"):
        h, sums = lax.scan(layer, x, params["ws"])
    with jax.named_scope("head"):
        h = lax.cond(jnp.sum(sums) > 0, lambda h: h @ params["w"], lambda h: jnp.exp(h), h)
        return jnp.mean(jnp.log(jax.nn.sigmoid(h @ params["w"])))


def looped(params, x):
    return lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: jnp.abs(c @ params["w"]) + 1, x)


PROGRAMS = {
    "forward": (transformer, BF16),
    "gradient": (jax.grad(transformer), BF16),
    "while": (looped, BF16),
    "unmatched": (transformer, BF16.with_rules({"*": "float32"}, scope="*/nowhere")),
    "one equation": (lambda params, x: jnp.sin(x), BF16),
    "no equation": (lambda params, x: x, BF16),
}


@pytest.fixture(scope="module")
def reports():
    return {name: explain(fn, PARAMS, X, policy=policy) for name, (fn, policy) in PROGRAMS.items()}


def test_a_column_says_what_the_compiler_made(show, reports):
    plan = reports["forward"]
    row = next(row for row in plan.rows if row.primitive == "dot_general")
    dot = CompiledProduct("dot", ("float32",) * 2, "float32", "float32", "ynn", "", 8, 1, "", "")
    made = explain_compiled(
        "HloModule m\nENTRY %e (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}"
    )
    made = dataclasses.replace(made, products=(dataclasses.replace(dot, source=row.source),))
    both = PlannedAndMade(plan, made)
    page = show(both)
    assert "compiled" in page.inner_text("#grid thead")
    assert "float32 -> float32 by ynn" in page.inner_text(f"#row-{row.index}")
    assert str(both).startswith(f"{made.summary}\n")


def shown(page):
    """The indices of the rows that the table holds, drawn or not."""
    return page.evaluate("table.shown.map((row) => row.index)")


def pick(page, index):
    page.evaluate("(index) => table.mark(index)", index)
    page.click(f"#row-{index}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_shows_every_program(show, reports, name):
    report = reports[name]
    page = show(report)
    equations = len(report.rows)
    assert count(page) == f"{equations} equation{'s' * (equations != 1)}"
    assert shown(page) == list(range(equations))
    assert page.inner_text("h1") == report.name
    assert report.compute_dtype in page.inner_text("#facts")
    if report.totals.contraction_flops:
        assert f"{100 * report.totals.low_share:.1f} %" in page.inner_text("#facts")
    assert page.locator("#tree .node").count() >= 1
    assert fits(page)
    shares = report.by_dtype()
    expected = [{"dtype": d, "flops": s.flops, "nbytes": s.nbytes} for d, s in shares.items()]
    assert page.evaluate("shares(rows)") == expected
    label = page.get_attribute("#chart svg[role=img]", "aria-label")
    assert all(dtype in label for dtype in shares)
    assert page.locator("#legend tbody tr").count() == len(shares)


def test_shares_count_what_is_inside_once(reports):
    shares = reports["forward"].by_dtype()
    rows = reports["forward"].rows
    assert sum(share.flops for share in shares.values()) == sum(row.flops for row in rows)
    structural = ("scan", "cond", "jit", "custom_jvp_call")
    inside = sum(row.nbytes for row in rows if row.primitive not in structural)
    assert sum(share.nbytes for share in shares.values()) == inside
    assert shares["bfloat16"].flops > shares["float32"].flops


def test_the_notices_and_the_facts(show, reports):
    assert "*/nowhere" in show(reports["unmatched"]).inner_text("#notices")
    page = show(reports["while"])
    assert "1 while loop counted as one iteration" in page.inner_text("#notices")
    assert "kept for the backward pass" not in page.inner_text("#facts")
    page, totals = show(reports["forward"]), reports["forward"].totals
    assert page.inner_text("#notices") == ""
    facts = page.inner_text("#facts")
    assert f"{totals.casts.down} down" in facts
    assert f"{totals.residual_nbytes / 1000:.3g}"[:3] in facts
    assert "kept for the backward pass" in facts


def test_filters(show, reports):
    rows = reports["forward"].rows
    page = show(reports["forward"])
    page.select_option("#reason", "FEEDER")
    assert shown(page) == [row.index for row in rows if row.reason == "FEEDER"]
    page.select_option("#reason", "")
    page.select_option("#primitive", "dot_general")
    dots = [row.index for row in rows if row.primitive == "dot_general"]
    assert shown(page) == dots
    assert count(page) == f"{len(dots)} of {len(rows)} equations"
    assert page.inner_text("#chart-of") == count(page)
    page.select_option("#dtype", "float32")
    assert shown(page) == []
    assert page.is_visible("#empty")
    page.click("#clear")
    assert shown(page) == list(range(len(rows)))
    assert page.is_hidden("#clear")
    page.check("#changed")
    pairs = [(row.declared_operands, row.declared_results) for row in rows]
    changed = [r.index for r, p in zip(rows, pairs, strict=True) if p != (r.operands, r.results)]
    assert shown(page) == changed


SEARCHES = {
    "LOGISTIC": lambda row: row.primitive == "logistic",
    "carry_acc": lambda row: row.reason == "CARRY_ACCUMULATOR",
    "0/ws": lambda row: "0/ws" in row.operand_inputs,
    "mlp TANH": lambda row: "mlp" in row.scope and row.primitive == "tanh",
    "test_html_report.py": lambda row: "test_html_report.py" in row.source,
    "#12": lambda row: row.index == 12,
}


def test_search(show, reports):
    page = show(reports["forward"])
    for query, matches in SEARCHES.items():
        page.fill("#query", query)
        assert shown(page) == [row.index for row in reports["forward"].rows if matches(row)]


def test_a_module_filters_the_table(show, reports):
    rows = reports["forward"].rows
    page = show(reports["forward"])
    names = page.locator("#tree .node-name").all_inner_texts()
    assert names[0] == "transformer"
    assert {"layers", "attention", "mlp", "head"} <= set(names)
    page.locator("#tree .node-name", has_text="attention").press("Enter")
    inside = [row.index for row in rows if f"{row.scope}/".startswith("layers/attention/")]
    assert shown(page) == inside
    assert len(inside) > 5
    assert page.evaluate("document.activeElement.textContent") == "attention"
    assert "layers / attention" in page.inner_text("#scope-chip")
    page.locator("#scope-chip button", has_text="layers").click()
    assert shown(page) == [row.index for row in rows if f"{row.scope}/".startswith("layers/")]
    nodes = page.locator("#tree .node:visible").count()
    page.locator("#tree summary", has_text="transformer").press("Enter")
    assert page.locator("#tree .node:visible").count() == 1 < nodes
    page.click("#scope-chip [aria-label='Show all modules']")
    assert shown(page) == list(range(len(rows)))
    root = page.locator("#tree .node").first
    by_flops = root.inner_text()
    page.check("#weigh input[value=nbytes]", force=True)
    assert root.inner_text() != by_flops


def explained(page):
    """The index of the row that the panel shows."""
    return int(re.match(r"#(\d+)", page.inner_text("#panel-title"))[1])


def steps(page):
    return page.evaluate(
        "[...document.querySelectorAll('#way li[data-row]')].map(x => +x.dataset.row)"
    )


@pytest.mark.parametrize("name", ["forward", "gradient"])
def test_a_reason_is_followed_to_its_cause(show, reports, name):
    rows = reports[name].rows
    start = max(rows, key=lambda row: len(follow(rows, row)))
    way = follow(rows, start)
    assert len(way) > 1
    page = show(reports[name])
    pick(page, start.index)
    assert steps(page) == way
    text = page.inner_text("#panel")
    assert start.reason in text
    assert start.source in text
    assert "Cause:" in page.inner_text("#way .end")
    for index in way[1:]:
        page.click(f"#way li >> nth=1 >> button[data-row='{index}']")
        assert explained(page) == index
        assert page.locator(f"#row-{index}.opened").count() == 1
    for index in reversed(way[:-1]):
        page.click("#panel .back")
        assert explained(page) == index
    page.keyboard.press("Escape")
    assert page.is_hidden("#panel")
    for row in rows[:: 1 if name == "forward" else 5]:
        page.evaluate("(index) => openRow(index)", row.index)
        assert explained(page) == row.index
        assert steps(page) == follow(rows, row)
        assert page.inner_text("#way .end").removeprefix("Cause:").strip()


def test_the_panel_tells_the_dtypes_and_who_made_and_reads_the_values(show, reports):
    rows = reports["forward"].rows
    dot = [row for row in rows if row.primitive == "dot_general"][-1]
    page = show(reports["forward"])
    pick(page, dot.index)
    operands, results = page.locator("#panel .values").all()
    assert "f32[8,8] → bf16" in operands.inner_text()
    assert "input 0/w, a parameter" in operands.inner_text()
    made = f"#{dot.operand_rows[0]} {rows[dot.operand_rows[0]].primitive}"
    assert f"made by {made}" in " ".join(operands.inner_text().split())
    reader = next(row for row in rows if dot.index in row.operand_rows)
    results.locator("button").first.click()
    assert explained(page) == reader.index
    page.click("#panel .facts-list .link")
    assert shown(page) == [r.index for r in rows if f"{r.scope}/".startswith(f"{reader.scope}/")]


def test_rows_by_keyboard_and_by_address(show, reports):
    page = show(reports["forward"])
    page.keyboard.press("/")
    page.keyboard.type("dot_general")
    page.focus("#grid")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert explained(page) == shown(page)[1]
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "grid"
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert explained(page) == shown(page)[-1]
    assert page.url.endswith(f"#equation-{shown(page)[-1]}")
    assert explained(show(reports["forward"], "#equation-12")) == 12
    assert show(reports["forward"], "#equation-99999").is_hidden("#panel")


def test_a_long_program_has_few_elements(show):
    def long(x):
        for i in range(1000):
            with jax.named_scope(f"layer_{i // 100}"):
                x = jnp.sin(x) * 2.0
        return x

    with jax.check_tracer_leaks(False):
        report = explain(long, X, policy=BF16)
    page = show(report)
    assert count(page) == "2,000 equations"
    assert page.locator(".row").count() < 100
    page.evaluate("find('grid').scrollTop = 1e6")
    page.wait_for_selector("#row-150", state="attached")
    page.focus("#grid")
    page.keyboard.press("End")
    assert page.is_visible("#row-1999")
    page.fill("#query", "sin layer_9")
    assert len(shown(page)) == 100
    assert page.locator(".row").count() < 100


CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const parts = [0, 2, 4].map((k) => parseInt(hex.slice(k, k + 2), 16) / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable(show, reports, scheme):
    page = show(reports["forward"], color_scheme=scheme)
    pairs = [(text, back) for text in ("--text", "--quiet", "--link")
             for back in ("--page", "--card", "--hover", "--chosen")]  # fmt: skip
    pairs += [("--on-color", color) for color in ("--low", "--full", "--other", "--none")]
    for text, back in pairs:
        ratio = page.evaluate(f"([a, b]) => ({CONTRAST})()(a, b)", [text, back])
        assert ratio >= 4.5, (text, back, ratio)
