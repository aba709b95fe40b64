// Puts the page together: filters decide which rows the table and the chart show.

const NOTHING = { scope: "", dtype: "", primitive: "", reason: "", query: "", changed: false };

const COLUMNS = [
  { key: "index", title: "#", kind: "number" },
  { key: "primitive", kind: "code", indent: (row) => row.depth },
  { key: "dtypes", kind: "code", value: dtypesOf, text: dtypesCell },
  { key: "reason", kind: "" },
  { key: "scope", kind: "scope", text: (row) => row.scope || "\u2013" },
  { key: "flops", title: "FLOPs", kind: "number", text: (row) => (row.flops ? number(row.flops) : "") },
  { key: "nbytes", title: "bytes", kind: "number", text: (row) => number(row.nbytes, "B") },
];

// What a compiler made of the lines of products, where a compiled program stands beside the plan.
if (data.made) {
  COLUMNS.splice(3, 0, { key: "compiled", kind: "code", value: (row) => data.made[row.index] });
}

let filters = { ...NOTHING, words: [] };
let visited = []; // the rows opened one after the other, for the way back
let chartFor = rows;

const tree = new Tree(find("tree"), (scope) => applyFilters({ scope }));
const table = new Table(find("grid"), COLUMNS, rows, {
  prefix: "row",
  open: (row) => openRow(row.index),
  look: (row) => kindOf(row.dtype),
});
const panel = new Panel(find("panel"), {
  open: (index) => openRow(index),
  close: closePanel,
  back: () => {
    visited.pop();
    const index = visited.pop();
    if (index === undefined) closePanel();
    else openRow(index);
  },
  scope: (scope) => applyFilters({ ...NOTHING, scope }),
});

// --- filters ------------------------------------------------------------------------------

function matches(row) {
  return isWithin(row, filters.scope)
    && (!filters.dtype || row.dtype === filters.dtype)
    && (!filters.primitive || row.primitive === filters.primitive)
    && (!filters.reason || row.reason === filters.reason)
    && (!filters.changed || row.changed)
    && filters.words.every((word) => searchText(row).includes(word));
}

function applyFilters(change) {
  filters = { ...filters, ...change };
  filters.words = filters.query.toLowerCase().split(/\s+/).filter(Boolean);
  for (const name of ["dtype", "primitive", "reason", "query"]) find(name).value = filters[name];
  find("changed").checked = filters.changed;
  const shown = rows.filter(matches);
  table.show(shown);
  tree.select(filters.scope);
  const all = shown.length === rows.length;
  find("count").textContent = all
    ? plural(rows.length, "equation")
    : `${shown.length.toLocaleString("en")} of ${plural(rows.length, "equation")}`;
  find("empty").hidden = shown.length > 0;
  find("clear").hidden = Object.keys(NOTHING).every((name) => filters[name] === NOTHING[name]);
  showScope();
  chartFor = shown;
  find("chart-of").textContent = all ? "whole program, loops multiplied by their length" : find("count").textContent;
  drawChart(chartFor);
}

function showScope() {
  const chip = find("scope-chip");
  chip.hidden = !filters.scope;
  const parts = filters.scope.split("/");
  const links = parts.flatMap((name, k) => {
    const path = parts.slice(0, k + 1).join("/");
    const link = element("button", {
      type: "button", class: "link", click: () => applyFilters({ scope: path }),
    }, name);
    return k ? [" / ", link] : [link];
  });
  const remove = element("button", {
    type: "button", class: "plain", "aria-label": "Show all modules",
    click: () => applyFilters({ scope: "" }),
  }, "\u00d7");
  chip.replaceChildren(element("span", { class: "quiet" }, "in "), ...links, remove);
}

function fillSelect(id, title, valueOf) {
  const counts = new Map();
  for (const row of rows) counts.set(valueOf(row), (counts.get(valueOf(row)) || 0) + 1);
  const options = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  find(id).replaceChildren(
    element("option", { value: "" }, title),
    ...options.map(([name, count]) => element("option", { value: name }, `${name || "none"} (${count})`)));
}

// --- the row that is open -----------------------------------------------------------------

function dtypesOf(row) {
  const ends = [dtypesText(row.operands), dtypesText(row.results)];
  return ends.filter(Boolean).join(" \u2192 ");
}

function dtypesCell(row) {
  const mark = element("span", { class: `swatch ${kindOf(row.dtype)}`, "aria-hidden": "true" });
  return element("span", null, mark, dtypesOf(row));
}

function openRow(index) {
  if (visited.at(-1) !== index) visited.push(index);
  document.body.classList.add("with-panel");
  panel.show(rows[index], visited.length > 1);
  table.mark(index);
  remember(`#equation-${index}`);
}

function closePanel() {
  find("panel").hidden = true;
  document.body.classList.remove("with-panel");
  visited = [];
  table.mark(null);
  remember("#");
  find("grid").focus({ preventScroll: true });
}

// So that a row has an address. In the frame of a notebook there is none.
function remember(hash) {
  if (location.protocol !== "about:") history.replaceState(null, "", hash);
}

function openAddressed() {
  const found = /^#equation-(\d+)$/.exec(location.hash);
  if (found && Number(found[1]) < rows.length) openRow(Number(found[1]));
}

// --- the head of the page -----------------------------------------------------------------

function fillHead() {
  const totals = data.totals;
  const share = (100 * totals.low_share).toFixed(1);
  const has = totals.contraction_flops > 0;
  const meter = element("span", { class: "meter", "aria-hidden": "true" }, element("i", { class: "low" }));
  meter.firstChild.style.width = `${has ? share : 0}%`;
  const fact = (value, name, note, extra) => element("div", { class: "fact" },
    element("p", { class: "fact-value" }, value), element("p", { class: "fact-name" }, name),
    element("p", { class: "quiet" }, note), ...(extra ? [extra] : []));
  const { casts } = totals;
  const facts = [
    has
      ? fact(`${share} %`, `in ${data.compute_dtype}`, "of matmul and convolution FLOPs", meter)
      : fact("none", `in ${data.compute_dtype}`, "no matmul or convolution", null),
    fact(number(totals.flops), "FLOPs", `${number(totals.contraction_flops)} in matmuls and convolutions`),
    fact((casts.down + casts.up).toLocaleString("en"), "casts",
      `${casts.down} down (${number(casts.down_nbytes, "B")}), ${casts.up} up (${number(casts.up_nbytes, "B")})`),
    fact(totals.parameters.toLocaleString("en"), "parameters", `${plural(totals.cast_parameters, "16-bit copy").replace("copys", "copies")}`),
  ];
  if (totals.residual_nbytes !== null) {
    const declared = totals.declared_residual_nbytes;
    const instead = declared === null ? "" : `instead of ${number(declared, "B")} in float32; `;
    facts.splice(3, 0, fact(number(totals.residual_nbytes, "B"), "kept for the backward pass",
      `${instead}${number(totals.float32_residual_nbytes, "B")} of it in float32`));
  }
  const { roofline } = data;
  if (roofline && roofline.speedup !== null) {
    const gain = roofline.speedup < 1.05 ? "no gain" : `${Number(roofline.speedup.toPrecision(2))}\u00d7 at most`;
    facts.splice(1, 0, fact(gain, `on ${roofline.device}`, roofline.says));
  }
  find("facts").replaceChildren(...facts);
  const notices = [];
  if (totals.unknown.length) notices.push(`No rule for ${totals.unknown.join(", ")}: kept as declared.`);
  if (totals.unmatched_scopes.length) notices.push(`No scope matched ${totals.unmatched_scopes.join(", ")}.`);
  if (totals.loops_of_unknown_length) {
    notices.push(`${plural(totals.loops_of_unknown_length, "while loop")} counted as one iteration.`);
  }
  find("notices").replaceChildren(...notices.map((text) => element("li", null, text)));
}

function fillKey() {
  const names = { low: "16-bit", full: "float32", other: "other floats" };
  const used = Object.keys(names).filter((kind) => tree.root.flops[kind] || tree.root.nbytes[kind]);
  find("key").replaceChildren(...used.map((kind) => element("li", null,
    element("span", { class: `swatch ${kind}` }), names[kind])));
}

// --- start --------------------------------------------------------------------------------

fillHead();
fillKey();
data.sections.filter((section) => section.rows.length).forEach(drawSection);
fillSelect("dtype", "all dtypes", (row) => row.dtype);
fillSelect("primitive", "all primitives", (row) => row.primitive);
fillSelect("reason", "all reasons", (row) => row.reason);
find("tree-fold").open = !matchMedia("(max-width: 760px)").matches;

for (const name of ["dtype", "primitive", "reason"]) {
  find(name).addEventListener("change", (event) => applyFilters({ [name]: event.target.value }));
}
find("query").addEventListener("input", (event) => applyFilters({ query: event.target.value }));
find("changed").addEventListener("change", (event) => applyFilters({ changed: event.target.checked }));
find("filters").addEventListener("submit", (event) => event.preventDefault());
find("filters").addEventListener("reset", (event) => {
  event.preventDefault();
  applyFilters(NOTHING);
});
find("weigh").addEventListener("change", (event) => {
  tree.weight = event.target.value;
  tree.draw();
});
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape" && !find("panel").hidden) closePanel();
  if (event.key === "/" && !typing) {
    event.preventDefault();
    find("query").focus();
  }
});
new ResizeObserver(() => drawChart(chartFor)).observe(find("chart"));
window.addEventListener("hashchange", openAddressed);

applyFilters(NOTHING);
openAddressed();
