// Tables of what several reports show, each sorted and searched by itself.

const DECADES = 7; // a bar is as long as the logarithm of an error: from 1e-7 to 1
const SEARCHED = 15; // a table of more rows can be searched

// JSON has no infinity, and no NaN. What is not known is less than nothing.
function amount(value) {
  if (typeof value === "number") return value;
  return value === "inf" ? Infinity : -Infinity;
}

function time(seconds) {
  if (typeof seconds !== "number") return "\u2013";
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 0]].find(([, least]) => seconds >= least);
  return `${Number((seconds / (size || 1e-9)).toPrecision(3))} ${unit}`;
}

const TEXTS = {
  text: (value) => (typeof value === "number" ? value.toFixed(5) : String(value)),
  count: (value) => value.toLocaleString("en"),
  number: (value) => (typeof value === "number" ? number(value) : value),
  bytes: (value) => number(value, "B"),
  seconds: time,
  gain: (value) => (typeof value === "number" ? String(Number(value.toPrecision(2))) : "\u2013"),
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
