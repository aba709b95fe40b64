// The modules of the program, from the scopes of its rows, colored by precision.

const KINDS = ["low", "full", "other"];
const OPEN_AT_FIRST = 24;

class Tree {
  constructor(container, choose) {
    this.container = container;
    this.choose = choose;
    this.weight = "flops";
    this.chosen = "";
    this.nodes = new Map();
    this.root = this.build();
    this.openFirst();
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

  draw() {
    const hadFocus = this.container.contains(document.activeElement);
    this.container.replaceChildren(this.drawNode(this.root));
    if (hadFocus) this.container.querySelector("[aria-pressed=true]").focus();
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
    const name = element("button", {
      type: "button", class: "node-name", "aria-pressed": String(node.path === this.chosen),
      click: () => this.choose(node.path === this.chosen ? "" : node.path),
      title: `${visible(node.name)}: ${plural(node.count, "equation")}, `
        + `${percent(weights.low, total)} of ${this.weight === "nbytes" ? "bytes" : "FLOPs"} in 16 bits`,
    }, node.name);
    const parts = [name, bar, element("span", { class: "node-share" }, shareText(weights, total))];
    if (!node.children.length) return element("div", { class: "node leaf" }, ...parts);
    const fold = element("details", { open: node.open }, element("summary", { class: "node" }, ...parts));
    const fill = () => {
      node.open = fold.open;
      if (node.open && fold.children.length === 1) {
        fold.append(element("div", { class: "children" }, ...node.children.map((child) => this.drawNode(child))));
      }
    };
    fold.addEventListener("toggle", fill);
    fill();
    return fold;
  }

  select(path) {
    this.chosen = path;
    for (let node = this.nodes.get(path)?.parent; node; node = node.parent) node.open = true;
    this.draw();
  }

  build() {
    const none = () => ({ low: 0, full: 0, other: 0, none: 0 });
    const make = (name, path, parent) => {
      const node = {
        name, path, parent, open: false, count: 0, children: [], flops: none(), nbytes: none(),
      };
      if (parent) parent.children.push(node);
      return node;
    };
    const root = make(data.name, "", null);
    for (const row of rows) {
      const around = [root];
      const names = row.scope === "" ? [] : row.scope.split("/");
      names.forEach((name, k) => {
        const path = names.slice(0, k + 1).join("/");
        if (!this.nodes.has(path)) this.nodes.set(path, make(name, path, around.at(-1)));
        around.push(this.nodes.get(path));
      });
      for (const node of around) {
        node.count += 1;
        node.flops[kindOf(row.dtype)] += row.flops;
        for (const [dtype, nbytes] of row.nbytes_by_dtype) node.nbytes[kindOf(dtype)] += nbytes;
      }
    }
    return root;
  }
}

function shareText(weights, total) {
  if (!total) return "\u2013";
  const share = weights.low / total;
  if (share > 0.995) return "16-bit";
  if (weights.full / total > 0.995) return "f32";
  return `${Math.max(Math.round(100 * share), share ? 1 : 0)} %`;
}
