// A page of pictures and tables: what is kept for the backward pass, and what other reports show.

const [ACROSS, TALL, NAMES] = [14, 90, 150]; // pixels of a bar, and of the names below the bars
const [LONG, LINES, WORDS] = [420, 20, 330]; // of a bar of a scope, of its line, and of its name

// What each scope keeps, filled, and what is computed again there, outlined.
function drawScopes(scopes) {
  const most = Math.max(...scopes.map(([, kept, again]) => kept + again), 1);
  const caption = "What each scope keeps for the backward pass, filled, and what is computed again in it, "
    + "outlined. Scopes that differ by a number are one.";
  const [width, height] = [WORDS + LONG + 90, LINES * scopes.length];
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": caption });
  scopes.forEach(([scope, kept, again], k) => {
    const name = visible(scope);
    const shown = name.length > 46 ? `\u2026${name.slice(-45)}` : name;
    const [x, y] = [WORDS, LINES * k + 3];
    const [filled, outlined] = [(LONG * kept) / most, (LONG * again) / most];
    const said = svg("title", {});
    said.textContent = `${name}: ${number(kept, "B")} kept, ${number(again, "B")} computed again`;
    const group = svg("g", { class: "scope-bar" });
    const parts = [["kept", x, filled], ["again", x + filled + 1, outlined]].filter(([, , long]) => long > 0);
    group.append(said, svgText(0, y + 11, shown, "name"), ...parts.map(([kind, from, long]) => (
      svg("rect", { class: kind, x: from, y, width: Math.max(long, 1), height: LINES - 8 })
    )), svgText(x + filled + outlined + 8, y + 11, number(kept, "B"), "name"));
    picture.append(group);
  });
  find("sections").append(element("section", { class: "card" }, element("h2", null, "By scope"),
    element("div", { class: "picture", tabindex: 0 }, picture), element("p", { class: "quiet" }, caption)));
}

function drawCut([scope, times, count, values]) {
  const kinds = { kept: "kept", "computed again": "again", "not read": "unread" };
  const largest = Math.max(...values.filter((v) => v.fate !== "not read").map((v) => v.nbytes), 1);
  const caption = "Each bar is a value, in program order, as high as its bytes (the highest: "
    + `${number(largest, "B")}${times > 1 ? `, in each of ${times} runs` : ""}). Filled: kept for the `
    + "backward pass. Outlined: computed again there. A line: no derivative reads it."
    + (count > values.length ? ` ${plural(count - values.length, "smaller value")} in JSON.` : "");
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

if (data.scopes && data.scopes.length) drawScopes(data.scopes);
data.cuts.forEach(drawCut);
data.sections.forEach(drawSection);
