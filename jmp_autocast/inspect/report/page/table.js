// The table of rows. Only what is in sight has elements, so that long programs stay quick.

const COLUMNS = [
  ["index", "#", "number"],
  ["primitive", "primitive", "code"],
  ["dtypes", "dtypes", "code"],
  ["reason", "reason", ""],
  ["scope", "scope", "scope"],
  ["flops", "FLOPs", "number"],
  ["nbytes", "bytes", "number"],
];
const BEYOND = 10; // rows drawn above and below what is in sight
const STEP = 5; // rows to scroll before they are drawn anew

class Table {
  constructor(grid, open) {
    this.grid = grid;
    this.head = grid.querySelector("#grid-head");
    this.body = grid.querySelector("#grid-body");
    this.open = open;
    this.shown = rows;
    this.active = 0; // the position in what is shown
    this.opened = null; // the index of a row
    this.sort = { key: "index", down: false };
    this.drawHead();
    grid.setAttribute("aria-colcount", COLUMNS.length);
    grid.addEventListener("scroll", () => this.later(), { passive: true });
    grid.addEventListener("keydown", (event) => this.onKey(event));
    this.body.addEventListener("click", (event) => {
      const item = event.target.closest(".row");
      if (item) this.pick(Number(item.dataset.at));
    });
    new ResizeObserver(() => this.later()).observe(grid);
  }

  drawHead() {
    this.head.replaceChildren(...COLUMNS.map(([key, title, kind]) => {
      const sorted = this.sort.key === key;
      const arrow = sorted ? (this.sort.down ? " \u2193" : " \u2191") : "";
      const button = element("button", {
        type: "button", class: "sort", "data-key": key, click: () => this.sortBy(key),
      }, title + arrow);
      const order = sorted ? (this.sort.down ? "descending" : "ascending") : "none";
      const attributes = { role: "columnheader", class: `cell ${key} ${kind}`, "aria-sort": order };
      return element("div", attributes, button);
    }));
  }

  sortBy(key) {
    const byNumber = ["flops", "nbytes"].includes(key);
    const down = this.sort.key === key ? !this.sort.down : byNumber;
    this.sort = { key, down };
    this.drawHead();
    this.show(this.shown);
  }

  show(some) {
    const { key, down } = this.sort;
    const value = (row) => (key === "dtypes" ? dtypesOf(row) : row[key]);
    const before = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
    const sign = down ? -1 : 1;
    this.shown = [...some].sort((a, b) => sign * before(a, b) || a.index - b.index);
    this.active = Math.max(this.shown.findIndex((row) => row.index === this.opened), 0);
    this.grid.setAttribute("aria-rowcount", this.shown.length + 1);
    this.draw();
    this.grid.scrollTop = 0;
    if (this.shown.some((row) => row.index === this.opened)) this.scrollTo(this.active);
  }

  rowHeight() {
    return parseFloat(getComputedStyle(this.grid).getPropertyValue("--row"));
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw(false);
    });
  }

  // A little scrolling changes nothing, so that what the pointer is on stays.
  draw(anyway = true) {
    const height = this.rowHeight();
    const above = Math.floor(this.grid.scrollTop / height / STEP) * STEP;
    const first = Math.max(above - BEYOND, 0);
    const count = Math.ceil(this.grid.clientHeight / height) + STEP + 2 * BEYOND;
    const drawn = [first, count, height].join();
    if (!anyway && drawn === this.drawn) return;
    this.drawn = drawn;
    this.body.style.height = `${this.shown.length * height}px`;
    const some = this.shown.slice(first, first + count);
    this.body.replaceChildren(...some.map((row, k) => {
      const item = this.drawRow(row, first + k);
      item.style.top = `${(first + k) * height}px`;
      return item;
    }));
    const active = this.shown[this.active];
    if (active) this.grid.setAttribute("aria-activedescendant", `row-${active.index}`);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  drawRow(row, at) {
    const state = `${at === this.active ? " active" : ""}${row.index === this.opened ? " opened" : ""}`;
    const cells = {
      index: row.index,
      primitive: row.primitive,
      dtypes: dtypesCell(row),
      reason: row.reason,
      scope: row.scope || "\u2013",
      flops: row.flops ? number(row.flops) : "",
      nbytes: number(row.nbytes, "B"),
    };
    const made = COLUMNS.map(([key, , kind]) => element("span", {
      role: "gridcell", class: `cell ${key} ${kind}`,
      title: key === "scope" ? visible(row.scope) : null,
    }, cells[key]));
    made[1].style.paddingInlineStart = `${12 * Math.min(row.depth, 5)}px`;
    return element("div", {
      id: `row-${row.index}`, class: `row ${kindOf(row.dtype)}${state}`, role: "row",
      "data-at": at, "aria-rowindex": at + 2, "aria-selected": String(row.index === this.opened),
    }, ...made);
  }

  // A step beyond the edge scrolls by a step, anything farther brings the row to the middle.
  scrollTo(at) {
    const height = this.rowHeight();
    const top = at * height;
    const room = this.grid.clientHeight - this.head.offsetHeight - height;
    const above = this.grid.scrollTop - top;
    const below = top - this.grid.scrollTop - room;
    if (above > height || below > height) this.grid.scrollTop = top - room / 2;
    else if (above > 0) this.grid.scrollTop = top;
    else if (below > 0) this.grid.scrollTop = top - room;
  }

  // Marks a row as open, wherever it stands.
  mark(index) {
    this.opened = index;
    const at = this.shown.findIndex((row) => row.index === index);
    if (at >= 0) {
      this.active = at;
      this.scrollTo(at);
    }
    this.draw();
  }

  pick(at) {
    this.active = at;
    if (this.shown[at]) this.open(this.shown[at].index);
  }

  onKey(event) {
    const page = Math.max(Math.floor(this.grid.clientHeight / this.rowHeight()) - 2, 1);
    const last = this.shown.length - 1;
    const moves = {
      ArrowDown: this.active + 1, ArrowUp: this.active - 1,
      PageDown: this.active + page, PageUp: this.active - page, Home: 0, End: last,
    };
    if (event.target !== this.grid) return;
    if (event.key in moves) {
      event.preventDefault();
      this.active = Math.min(Math.max(moves[event.key], 0), Math.max(last, 0));
      this.scrollTo(this.active);
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.pick(this.active);
    }
  }
}

function dtypesOf(row) {
  const ends = [dtypesText(row.operands), dtypesText(row.results)];
  return ends.filter(Boolean).join(" \u2192 ");
}

function dtypesCell(row) {
  const mark = element("span", { class: `swatch ${kindOf(row.dtype)}`, "aria-hidden": "true" });
  return element("span", null, mark, dtypesOf(row));
}
