// A table that is sorted by its columns. Rows are drawn as far as they are in sight, so that long
// programs stay quick.

const DRAWN = 80; // rows that are drawn at a time

class Table {
  // A column has a key, a title, a kind (its class), and functions of a row: its value, by which it
  // is sorted, its text, an indent and a style. Options: the prefix of the ids of rows, open(row),
  // and look(row), the class of a row.
  constructor(grid, columns, all, { prefix = grid.id, open = () => {}, look = () => "" } = {}) {
    this.columns = columns.map((column) => {
      const value = column.value || ((row) => row[column.key]);
      return { title: column.key, text: value, ...column, value };
    });
    Object.assign(this, { grid, prefix, open, look, shown: all, active: 0, opened: null });
    this.sort = { key: "index", down: false };
    this.head = element("tr");
    this.body = element("tbody");
    grid.replaceChildren(element("table", null, element("thead", null, this.head), this.body));
    this.drawHead();
    grid.addEventListener("scroll", () => {
      if (grid.scrollTop + 2 * grid.clientHeight > grid.scrollHeight) this.drawMore();
    }, { passive: true });
    grid.addEventListener("keydown", (event) => this.onKey(event));
    this.body.addEventListener("click", (event) => this.pick(event.target.closest("tr").sectionRowIndex));
  }

  drawHead() {
    this.head.replaceChildren(...this.columns.map(({ key, title, kind }) => {
      const sorted = this.sort.key === key;
      const button = element("button", {
        type: "button", class: "sort", "data-key": key, click: () => this.sortBy(key),
      }, title + (sorted ? (this.sort.down ? " \u2193" : " \u2191") : ""));
      const order = sorted ? (this.sort.down ? "descending" : "ascending") : "none";
      return element("th", { class: `cell ${key} ${kind}`, "aria-sort": order }, button);
    }));
  }

  sortBy(key) {
    // Of numbers the largest are looked for, but of positions the first.
    const { kind } = this.columns.find((column) => column.key === key);
    const down = this.sort.key === key ? !this.sort.down : kind.includes("number") && key !== "index";
    this.sort = { key, down };
    this.drawHead();
    this.show(this.shown);
  }

  show(some) {
    const { key, down } = this.sort;
    const { value } = this.columns.find((column) => column.key === key) || { value: (row) => row.index };
    const before = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
    this.shown = [...some].sort((a, b) => (down ? -1 : 1) * before(a, b) || a.index - b.index);
    this.grid.setAttribute("aria-rowcount", this.shown.length + 1);
    this.body.replaceChildren();
    this.grid.scrollTop = 0;
    this.drawMore();
    this.active = 0;
    this.mark(this.opened);
  }

  drawMore(last = this.body.children.length) {
    const some = this.shown.slice(this.body.children.length, last + DRAWN);
    this.body.append(...some.map((row) => this.drawRow(row)));
  }

  drawRow(row) {
    const cells = this.columns.map(({ key, kind, text, value, indent, style }) => {
      const title = kind === "scope" ? visible(value(row)) : null;
      const cell = element("td", { class: `cell ${key} ${kind}`, title }, text(row));
      if (indent) cell.style.paddingInlineStart = `${10 + 12 * Math.min(indent(row), 5)}px`;
      if (style) style(cell, row);
      return cell;
    });
    return element("tr", { id: `${this.prefix}-${row.index}`, class: `row ${this.look(row)}` }, ...cells);
  }

  move(at) {
    if (at >= this.body.children.length) this.drawMore(at);
    this.active = Math.min(Math.max(at, 0), Math.max(this.shown.length - 1, 0));
    this.body.querySelector(".active")?.classList.remove("active");
    const item = this.body.children[this.active];
    if (!item) return;
    item.classList.add("active");
    this.grid.setAttribute("aria-activedescendant", item.id);
    const [above, below] = [this.head.offsetHeight, this.grid.clientHeight - item.offsetHeight];
    const top = item.offsetTop - this.grid.scrollTop;
    if (top < above || top > below) this.grid.scrollTop = item.offsetTop - this.grid.clientHeight / 2;
  }

  // Marks a row as open, wherever it stands.
  mark(index) {
    this.opened = index;
    const at = this.shown.findIndex((row) => row.index === index);
    if (at >= 0) this.move(at);
    this.body.querySelector(".opened")?.classList.remove("opened");
    if (at >= 0) this.body.children[at].classList.add("opened");
  }

  pick(at) {
    this.move(at);
    if (this.shown[at]) this.open(this.shown[at]);
  }

  onKey(event) {
    if (event.target !== this.grid) return;
    const moves = {
      ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + 15,
      PageUp: this.active - 15, Home: 0, End: this.shown.length - 1,
    };
    if (event.key in moves) this.move(moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.pick(this.active);
    else return;
    event.preventDefault();
  }
}
