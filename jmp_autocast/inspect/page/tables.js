// A page of pictures and tables: what several reports show.

const DECADES = 7; // a bar is as long as the logarithm of an error: from 1e-7 to 1
const SEARCHED = 15; // a table of more rows can be searched
const [ACROSS, TALL, NAMES] = [14, 90, 150]; // pixels of a bar, and of the names below the bars

// JSON has no infinity, and no NaN.
function amount(value) {
  if (typeof value === "number") return value;
  return value === "inf" ? Infinity : -Infinity;
}

const TEXTS = {
  text: (value) => (typeof value === "number" ? value.toFixed(5) : String(value)),
  count: (value) => value.toLocaleString("en"),
  number: (value) => (typeof value === "number" ? number(value) : value),
  bytes: (value) => number(value, "B"),
  error: (value) => (typeof value === "number" ? String(Number(value.toPrecision(2))) : value),
};

function column([title, kind], k) {
  const isText = kind === "text";
  const bar = (cell, row) => {
    const share = row.cells[k] === 0 ? 0 : 1 + Math.log10(amount(row.cells[k])) / DECADES;
    cell.style.setProperty("--share", `${100 * Math.min(Math.max(share || 0, 0), 1)}%`);
  };
  return {
    key: `c${k}`, title, kind: isText ? "code" : kind === "error" ? "error number" : "number",
    value: (row) => (isText ? row.cells[k] : amount(row.cells[k])),
    text: (row) => TEXTS[kind](row.cells[k]),
    style: kind === "error" ? bar : null,
  };
}

function drawSection({ title, columns, rows }, n) {
  const all = rows.map((cells, index) => ({
    index, cells: cells.map((cell) => (Array.isArray(cell) ? `[${cell.join(",")}]` : cell)),
  }));
  const grid = element("div", { class: "grid", id: `table${n}`, role: "grid", tabindex: 0, "aria-label": title });
  const count = element("p", { class: "quiet", "aria-live": "polite" }, plural(rows.length, "row"));
  const card = element("section", { class: "card" },
    element("div", { class: "card-head" }, element("h2", null, title), count));
  if (rows.length > SEARCHED) {
    const search = element("input", { type: "search", placeholder: "Search \u2026", "aria-label": `Search: ${title}` });
    search.addEventListener("input", () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const texts = (row) => row.cells.join("\n").toLowerCase();
      const some = all.filter((row) => words.every((word) => texts(row).includes(word)));
      count.textContent = `${some.length.toLocaleString("en")} of ${plural(all.length, "row")}`;
      table.show(some);
    });
    card.append(element("div", { class: "filters" }, search));
  }
  card.append(grid);
  find("sections").append(card);
  const table = new Table(grid, columns.map(column), all);
  table.show(all);
}

function drawCut([scope, times, count, values]) {
  const kinds = { kept: "kept", "computed again": "again", "not read": "unread" };
  const largest = Math.max(...values.filter((v) => v.fate !== "not read").map((v) => v.nbytes), 1);
  const caption = "Each bar is a value, in program order, as high as its bytes (the highest: "
    + `${number(largest, "B")}${times > 1 ? `, in each of ${times} runs` : ""}). Filled: kept for the `
    + "backward pass. Outlined: computed again there. A line: no derivative reads it."
    + (count > values.length ? ` ${plural(count - values.length, "value")} more in JSON.` : "");
  const [width, height] = [ACROSS * (values.length + 1), TALL + NAMES];
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": caption });
  values.forEach((v, k) => {
    const name = v.primitive || "input";
    const share = v.fate === "not read" ? 0 : v.nbytes / largest;
    const [x, tall] = [ACROSS * k + 2, Math.max(TALL * share, 2)];
    const says = `${name} ${v.dtype}[${v.shape.join(", ")}], ${number(v.nbytes, "B")}, ${v.fate}`;
    const said = svg("title", {});
    said.textContent = [says, v.scope, v.source].filter(Boolean).map(visible).join("\n");
    const label = svgText(0, 0, visible(name), "name");
    label.setAttribute("transform", `translate(${x + 8} ${TALL + 6}) rotate(90)`);
    const group = svg("g", { class: kinds[v.fate] });
    group.append(said, svg("rect", { x, y: TALL - tall, width: ACROSS - 4, height: tall }), label);
    picture.append(group);
  });
  find("sections").append(element("section", { class: "card" },
    element("h2", null, scope ? `The cut in ${scope}` : "The cut"),
    element("div", { class: "picture", tabindex: 0 }, picture), element("p", { class: "quiet" }, caption)));
}

data.cuts.forEach(drawCut);
data.sections.forEach(drawSection);
