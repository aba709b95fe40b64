// Elements and numbers as text. Texts of the program reach the page here, and only as text.

const find = (id) => document.getElementById(id);
const data = JSON.parse(find("data").textContent);

const SHORT = { float32: "f32", float16: "f16", bfloat16: "bf16", float64: "f64" };

// Characters that would hide, or reverse what follows them.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

function visible(text) {
  const code = (c) => c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
  return String(text).replace(UNSEEN, (c) => `\u27e8U+${code(c)}\u27e9`);
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "click") made.addEventListener("click", value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  for (const child of children) {
    made.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return made;
}

// Text in which `...` is code.
function withCode(tag, text) {
  const parts = text.split("`").map((part, k) => (k % 2 ? element("code", null, part) : part));
  return element(tag, null, ...parts);
}

function short(dtype) {
  return SHORT[dtype] || dtype;
}

// "f32, bool", each once.
function dtypesText(names) {
  return [...new Set(names.map(short))].join(", ");
}

function number(value, unit = "") {
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let k = 0;
  while (Math.abs(value) >= 999.5 && k < prefixes.length - 1) {
    value /= 1000;
    k += 1;
  }
  const text = k ? value.toPrecision(3) : String(Math.round(value));
  return `${text} ${prefixes[k]}${unit}`.trim();
}

function percent(part, whole) {
  if (!whole) return "0 %";
  const share = (100 * part) / whole;
  if (share > 0 && share < 0.1) return "< 0.1 %";
  if (share < 100 && share > 99.9) return "> 99.9 %";
  return `${share === 100 || share === 0 ? share : share.toFixed(1)} %`;
}

function typeText(dtype, shape) {
  return `${short(dtype)}[${shape.join(",")}]`;
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

find("name").textContent = visible(data.name);
find("summary").textContent = visible(data.summary);
