// One row in full: where it stands, its values, why it has its dtypes, and the way to the cause.

const READERS_SHOWN = 6;
const SOURCES = { param: "a parameter", data: "data", const: "a constant", literal: "a literal" };

class Panel {
  constructor(aside, actions) {
    this.aside = aside;
    this.actions = actions; // open(index), close(), back(), scope(path)
  }

  show(row, canGoBack) {
    const title = element("h2", { id: "panel-title", tabindex: -1 },
      element("span", { class: "quiet" }, `#${row.index} `), row.primitive);
    const back = element("button", {
      type: "button", class: "plain back", disabled: !canGoBack, click: this.actions.back,
    }, "\u2190 Back");
    const close = element("button", {
      type: "button", class: "plain close", "aria-label": "Close", click: this.actions.close,
    }, "\u00d7");
    this.aside.replaceChildren(
      element("div", { class: "panel-bar" }, back, close),
      title, this.where(row), this.why(row), this.way(row), this.values(row));
    this.aside.hidden = false;
    this.aside.scrollTop = 0;
    title.focus({ preventScroll: true });
  }

  link(index, ...more) {
    return element("button", {
      type: "button", class: "link", "data-row": index, click: () => this.actions.open(index),
    }, `#${index} ${rows[index].primitive}`, ...more);
  }

  where(row) {
    const facts = element("dl", { class: "facts-list" });
    const add = (name, value) => facts.append(element("dt", null, name), element("dd", null, value));
    add("source", element("code", { class: "source" }, row.source || "unknown"));
    const scope = element("button", {
      type: "button", class: "link", click: () => this.actions.scope(row.scope),
    }, row.scope);
    add("scope", row.scope ? scope : "none");
    const around = enclosing(row).map((outer) => this.link(outer.index));
    if (around.length) add("inside", element("span", { class: "links" }, ...around));
    if (row.times !== 1) add("runs", `${row.times.toLocaleString("en")} times`);
    if (row.rule) add("rule", element("code", null, row.rule));
    if (row.flops) add("FLOPs", number(row.flops));
    const declared = row.declared_nbytes === row.nbytes ? "" : `, declared ${number(row.declared_nbytes, "B")}`;
    add("bytes", number(row.nbytes, "B") + declared);
    return facts;
  }

  why(row) {
    const [says, otherwise] = data.explanations[row.reason] || ["", ""];
    const box = element("section", { class: `why ${kindOf(row.dtype)}` },
      element("h3", null, "Why these dtypes"),
      element("p", null, element("code", { class: "reason-code" }, row.reason),
        row.cause ? ` ${row.cause}` : ""),
      withCode("p", says));
    if (otherwise) {
      // The texts name a primitive as an example; here it is the row's own.
      const advice = withCode("p", otherwise.replace(/\{"\w+":/, `{"${row.primitive}":`));
      advice.className = "otherwise";
      advice.prepend(element("span", { class: "quiet" }, "To change it: "));
      box.append(advice);
    }
    return box;
  }

  way(row) {
    const steps = chainOf(row);
    const list = element("ol", { class: "way", id: "way" });
    const folded = foldedSteps(steps);
    let fold = null;
    steps.forEach((step, k) => {
      if (folded.get(k)) {
        fold = element("ol", { class: "way" });
        list.append(element("li", { class: "folded" }, element("details", null,
          element("summary", { class: "quiet" }, `${folded.get(k)} more like it`), fold)));
      }
      const mark = element("span", { class: `swatch ${kindOf(step.dtype)}`, "aria-hidden": "true" });
      const name = k ? this.link(step.index) : element("strong", null, `#${step.index} ${step.primitive}`);
      const item = element("li", { "data-row": step.index }, mark, name, " ",
        element("span", { class: "code quiet" }, dtypesOf(step)),
        element("p", null, element("code", null, step.reason), step.cause ? ` ${step.cause}` : "",
          ...this.behind(step)));
      const next = steps[k + 1];
      const others = step.cause_rows.filter((index) => !next || index !== next.index);
      if (next && others.length) {
        const links = others.slice(0, 3).map((index) => this.link(index));
        const more = others.length > 3 ? [` and ${others.length - 3} more`] : [];
        item.append(element("p", { class: "links quiet" }, "also ", ...links, ...more));
      }
      (folded.has(k) ? fold : list).append(item);
    });
    const end = element("li", { class: "end" }, element("strong", null, "Cause: "), ending(steps.at(-1)));
    list.append(end);
    const section = element("section", null, element("h3", null, "Follow the reason"));
    if (steps.length > 2) {
      // The answer first: a long chain is read for its end.
      section.append(element("p", { class: "cause-first" },
        element("strong", null, "Cause: "), ending(steps.at(-1)), " ", this.link(steps.at(-1).index)));
    }
    section.append(list);
    return section;
  }

  // The reader that a reason names may only move the value on: what decides is behind it.
  behind(row) {
    const [next] = row.cause_rows;
    if (!isRead(row) || next === undefined || row.readers.includes(next)) return [];
    return [", and behind it by ", this.link(next)];
  }

  values(row) {
    const operands = row.operands.map((dtype, k) => this.value(
      row.declared_operands[k], dtype, row.operand_shapes[k], row.cause_operands.includes(k),
      row.operand_rows[k] === null
        ? [madeBy(row, k)]
        : ["made by ", this.link(row.operand_rows[k]), ...sourceNote(row, k)]));
    const results = row.results.map((dtype, k) => this.value(
      row.declared_results[k], dtype, row.result_shapes[k], false, k ? [] : this.readersOf(row)));
    const list = (title, items) => (items.length
      ? [element("h3", null, title), element("ol", { class: "values", start: 0 }, ...items)] : []);
    return element("section", null, ...list("Operands", operands), ...list("Results", results));
  }

  value(declared, dtype, shape, isCause, notes) {
    const changed = declared !== dtype;
    const type = element("span", { class: "code" },
      element("span", { class: `swatch ${kindOf(dtype)}`, "aria-hidden": "true" }),
      changed ? `${typeText(declared, shape)} \u2192 ${short(dtype)}` : typeText(dtype, shape));
    const item = element("li", { class: isCause ? "cause" : "" }, type);
    if (isCause) item.append(element("span", { class: "tag" }, "decides"));
    if (notes.length) item.append(element("p", { class: "links" }, ...notes));
    return item;
  }

  readersOf(row) {
    if (!row.readers.length) return ["returned, or not read"];
    const links = row.readers.map((index) => this.link(index));
    const hidden = links.slice(READERS_SHOWN);
    hidden.forEach((link) => { link.hidden = true; });
    const more = element("button", { type: "button", class: "plain" }, `${hidden.length} more`);
    more.addEventListener("click", () => {
      hidden.forEach((link) => { link.hidden = false; });
      more.remove();
    });
    return ["read by ", ...links, ...(hidden.length ? [more] : [])];
  }
}

// The steps of a chain that are left out, since they repeat the step before and the one after them:
// from the position of each to how many there are, for the first of them, and to 0 for the others.
function foldedSteps(steps) {
  const folded = new Map();
  const alike = (a, b) => a.primitive === b.primitive && a.reason === b.reason;
  for (let start = 0; start < steps.length;) {
    let end = start;
    while (end + 1 < steps.length && alike(steps[end + 1], steps[start])) end += 1;
    for (let k = start + 1; end - start > 3 && k < end; k += 1) {
      folded.set(k, k === start + 1 ? end - start - 1 : 0);
    }
    start = end + 1;
  }
  return folded;
}

// The loops, branches and calls around a row, the outermost first.
function enclosing(row) {
  const found = [];
  let depth = row.depth;
  for (let k = row.index - 1; depth > 0; k -= 1) {
    if (rows[k].depth < depth) {
      depth = rows[k].depth;
      found.unshift(rows[k]);
    }
  }
  return found;
}

function madeBy(row, k) {
  const path = row.operand_inputs[k];
  const source = SOURCES[row.operand_sources[k]];
  if (path) return `input ${path}${source ? `, ${source}` : ""}`;
  return source || "a constant";
}

function sourceNote(row, k) {
  const source = SOURCES[row.operand_sources[k]];
  return source && floats.has(row.operands[k]) ? [`from ${source} alone`] : [];
}

function isRead(row) {
  return row.cause.startsWith("read by ");
}

function ending(row) {
  if (row.cause_rows.length) return "a carry: what the loop returns leads back to a row above.";
  const inputs = row.cause_operands.filter((k) => row.operand_rows[k] === null);
  if (inputs.length) return inputs.map((k) => `operand ${k} is ${madeBy(row, k)}`).join("; ");
  if (row.cause === "read by the output") return "the program returns it.";
  if (isRead(row)) return `${row.cause}, and what is made of it is returned.`;
  if (row.cause) return row.cause;
  if (row.rule && ["FP32", "LOWER_PRECISION", "KEEP"].includes(row.reason)) {
    return `the rule ${row.rule} of ${row.primitive}`;
  }
  const [says] = data.explanations[row.reason] || [row.reason];
  return says.replaceAll("`", "");
}
