// Two bars, FLOPs and bytes, divided among the dtypes; and the same as a table.

const BAR = 30;
const LINE = 22;
const GAP = 14;

function drawChart(some) {
  const found = shares(some);
  const chart = document.getElementById("chart");
  const width = Math.max(chart.clientWidth, 200);
  const measures = [["flops", "FLOPs", ""], ["nbytes", "Bytes", "B"]];
  const height = measures.length * (LINE + BAR + GAP) - GAP;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const said = [];
  measures.forEach(([key, title, unit], k) => {
    const total = found.reduce((sum, share) => sum + share[key], 0);
    const top = k * (LINE + BAR + GAP);
    picture.append(svgText(0, top + 14, `${title}  ${number(total, unit)}`, "chart-title"));
    picture.append(svg("rect", { x: 0, y: top + LINE, width, height: BAR, rx: 5, class: "track" }));
    const parts = found.filter((share) => share[key] > 0);
    parts.sort((a, b) => order(a.dtype) - order(b.dtype) || b[key] - a[key]);
    picture.append(...bar(parts, key, unit, total, width, top + LINE));
    said.push(`${title}: ${parts.map((p) => `${p.dtype} ${percent(p[key], total)}`).join(", ")}`);
  });
  picture.setAttribute("aria-label", said.join(". "));
  chart.replaceChildren(picture);
  drawLegend(found);
}

function order(dtype) {
  return ["low", "full", "other", "none"].indexOf(kindOf(dtype));
}

function bar(parts, key, unit, total, width, y) {
  let x = 0;
  return parts.map((share) => {
    const length = (width * share[key]) / total;
    const kind = kindOf(share.dtype);
    const group = svg("g", { class: `part ${kind}` });
    const name = `${share.dtype}: ${number(share[key], unit)}, ${percent(share[key], total)}`;
    const title = svg("title", {});
    title.textContent = name;
    const shown = Math.max(length - 2, 1);
    group.append(title, svg("rect", { x, y, width: shown, height: BAR, rx: Math.min(5, shown / 2) }));
    const label = [`${share.dtype}  ${percent(share[key], total)}`, short(share.dtype)]
      .find((text) => text.length * 7.2 + 16 < shown);
    if (label) group.append(svgText(x + 9, y + BAR / 2 + 4.5, label, "part-label"));
    x += length;
    return group;
  });
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function svgText(x, y, text, kind) {
  const made = svg("text", { x, y, class: kind });
  made.textContent = text;
  return made;
}

function drawLegend(found) {
  const totals = { flops: 0, nbytes: 0 };
  for (const share of found) {
    totals.flops += share.flops;
    totals.nbytes += share.nbytes;
  }
  const head = element("thead", null, element("tr", null,
    element("th", { scope: "col" }, "dtype"),
    element("th", { scope: "col", class: "number", colspan: 2 }, "FLOPs"),
    element("th", { scope: "col", class: "number", colspan: 2 }, "bytes")));
  const body = element("tbody");
  for (const share of found) {
    const swatch = element("span", { class: `swatch ${kindOf(share.dtype)}` });
    body.append(element("tr", null,
      element("th", { scope: "row" }, swatch, share.dtype),
      element("td", { class: "number" }, share.flops ? number(share.flops) : "\u2013"),
      element("td", { class: "number quiet" }, share.flops ? percent(share.flops, totals.flops) : ""),
      element("td", { class: "number" }, number(share.nbytes, "B")),
      element("td", { class: "number quiet" }, percent(share.nbytes, totals.nbytes))));
  }
  document.getElementById("legend").replaceChildren(head, body);
}
