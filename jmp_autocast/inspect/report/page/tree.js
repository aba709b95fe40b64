// The modules of the program, from the scopes of its rows, colored by precision.

const KINDS = ["low", "full", "other"];
const OPEN_AT_FIRST = 24;

class Tree {
  constructor(container, choose) {
    this.container = container;
    this.choose = choose;
    this.weight = "flops";
    this.chosen = "";
    this.active = "";
    this.root = buildTree();
    this.nodes = new Map();
    const collect = (node) => {
      this.nodes.set(node.path, node);
      node.children.forEach(collect);
    };
    collect(this.root);
    this.openFirst();
    container.addEventListener("keydown", (event) => this.onKey(event));
    container.addEventListener("click", (event) => this.onClick(event));
    this.draw();
  }

  // Level by level, as long as there is room.
  openFirst() {
    let level = [this.root];
    let shown = 1;
    while (level.length) {
      const next = level.flatMap((node) => node.children);
      shown += next.length;
      if (shown > OPEN_AT_FIRST && level[0] !== this.root) return;
      level.forEach((node) => { node.open = true; });
      level = next;
    }
  }

  visibleNodes() {
    const found = [];
    const visit = (node) => {
      found.push(node);
      if (node.open) node.children.forEach(visit);
    };
    visit(this.root);
    return found;
  }

  draw() {
    this.container.replaceChildren(...this.visibleNodes().map((node) => this.drawNode(node)));
    const active = this.container.querySelector(".active");
    if (active) this.container.setAttribute("aria-activedescendant", active.id);
  }

  drawNode(node) {
    const weights = node[this.weight];
    const total = KINDS.reduce((sum, kind) => sum + weights[kind], 0);
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    for (const kind of KINDS) {
      if (!weights[kind]) continue;
      const part = element("i", { class: kind });
      part.style.flexGrow = weights[kind] / total;
      bar.append(part);
    }
    const item = element("div", {
      id: `node-${node.number}`,
      class: `node${node.path === this.active ? " active" : ""}`,
      role: "treeitem",
      "data-node": node.number,
      "aria-level": node.level + 1,
      "aria-selected": String(node.path === this.chosen),
      "aria-expanded": node.children.length ? String(node.open) : null,
      title: `${visible(node.name)}: ${plural(node.count, "equation")}, `
        + `${percent(weights.low, total)} of ${this.weight === "nbytes" ? "bytes" : "FLOPs"} in 16 bits`,
    },
    element("span", { class: node.children.length ? "twist" : "twist leaf", "aria-hidden": "true" },
      node.children.length ? "\u25b8" : ""),
    element("span", { class: "node-name" }, node.name), bar,
    element("span", { class: "node-share" }, shareText(weights, total)));
    item.style.paddingInlineStart = `${6 + 14 * Math.min(node.level, 12)}px`;
    return item;
  }

  nodeOf(number) {
    return [...this.nodes.values()].find((node) => node.number === number);
  }

  select(path) {
    this.chosen = path;
    if (this.nodes.has(path)) {
      this.active = path;
      let node = this.nodes.get(path).parent;
      for (; node; node = node.parent) node.open = true;
    }
    this.draw();
  }

  onClick(event) {
    const item = event.target.closest(".node");
    if (!item) return;
    const node = this.nodeOf(Number(item.dataset.node));
    this.active = node.path;
    if (event.target.closest(".twist:not(.source)")) {
      node.open = !node.open;
      this.draw();
    } else {
      this.choose(node.path === this.chosen ? "" : node.path);
    }
  }

  onKey(event) {
    const shown = this.visibleNodes();
    const at = Math.max(shown.findIndex((node) => node.path === this.active), 0);
    const node = shown[at];
    const go = (target) => { if (target) this.active = target.path; };
    const keys = {
      ArrowDown: () => go(shown[at + 1]),
      ArrowUp: () => go(shown[at - 1]),
      Home: () => go(shown[0]),
      End: () => go(shown.at(-1)),
      ArrowRight: () => {
        if (node.open || !node.children.length) go(node.children[0]);
        else node.open = true;
      },
      ArrowLeft: () => {
        if (node.open && node.children.length) node.open = false;
        else go(node.parent);
      },
      Enter: () => this.choose(node.path === this.chosen ? "" : node.path),
      " ": () => this.choose(node.path === this.chosen ? "" : node.path),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
    this.draw();
    const active = this.container.querySelector(".active");
    if (active) active.scrollIntoView({ block: "nearest" });
  }
}

function buildTree() {
  let numbers = 0;
  const make = (name, path, parent) => ({
    name, path, parent,
    number: numbers++,
    level: parent ? parent.level + 1 : 0,
    open: false,
    count: 0,
    children: [],
    byName: new Map(),
    flops: { low: 0, full: 0, other: 0, none: 0 },
    nbytes: { low: 0, full: 0, other: 0, none: 0 },
  });
  const root = make(data.name, "", null);
  for (const row of rows) {
    const around = [root];
    for (const name of row.scope === "" ? [] : row.scope.split("/")) {
      const parent = around.at(-1);
      if (!parent.byName.has(name)) {
        const path = parent === root ? name : `${parent.path}/${name}`;
        const node = make(name, path, parent);
        parent.byName.set(name, node);
        parent.children.push(node);
      }
      around.push(parent.byName.get(name));
    }
    for (const node of around) {
      node.count += 1;
      node.flops[kindOf(row.dtype)] += row.flops;
      for (const [dtype, nbytes] of row.nbytes_by_dtype) node.nbytes[kindOf(dtype)] += nbytes;
    }
  }
  return root;
}

function shareText(weights, total) {
  if (!total) return "\u2013";
  const share = weights.low / total;
  if (share > 0.995) return "16-bit";
  if (weights.full / total > 0.995) return "f32";
  return `${Math.max(Math.round(100 * share), share ? 1 : 0)} %`;
}
