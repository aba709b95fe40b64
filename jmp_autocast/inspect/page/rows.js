// The data of the page: rows, and what follows from them. A row refers to others by index.

const floats = new Set(data.floats);

const rows = data.rows.map((list, index) => {
  const row = { index, readers: [] };
  data.columns.forEach((name, k) => {
    row[name] = data.shared.includes(name) ? data.values[list[k]] : list[k];
  });
  return row;
});

for (const row of rows) {
  row.changed = differ(row.declared_operands, row.operands)
    || differ(row.declared_results, row.results);
  for (const made of new Set(row.operand_rows)) {
    if (made !== null) rows[made].readers.push(row.index);
  }
}

function differ(before, after) {
  return before.some((name, k) => name !== after[k]);
}

// How a dtype is colored: 16 bits, float32, another float, or no float.
function kindOf(dtype) {
  if (dtype === "float16" || dtype === "bfloat16") return "low";
  if (dtype === "float32") return "full";
  return floats.has(dtype) ? "other" : "none";
}

// FLOPs and bytes of each dtype in some rows, the most bytes first: sums of what each row holds.
function shares(some) {
  const found = new Map();
  const share = (dtype) => {
    if (!found.has(dtype)) found.set(dtype, { dtype, flops: 0, nbytes: 0 });
    return found.get(dtype);
  };
  for (const row of some) {
    share(row.dtype).flops += row.flops;
    for (const [dtype, nbytes] of row.nbytes_by_dtype) share(dtype).nbytes += nbytes;
  }
  const order = (a, b) => b.nbytes - a.nbytes || (a.dtype < b.dtype ? -1 : 1);
  return [...found.values()].filter((part) => part.flops || part.nbytes).sort(order);
}

function searchText(row) {
  if (row.text === undefined) {
    row.text = [
      `#${row.index}`, row.primitive, row.scope, row.source, row.reason, row.cause, row.rule,
      ...row.operand_inputs,
    ].join("\n").toLowerCase();
  }
  return row.text;
}

function isWithin(row, scope) {
  return scope === "" || row.scope === scope || row.scope.startsWith(`${scope}/`);
}

// The rows from one to the cause of its dtypes: the first that each reason points at. Only the carry
// of a loop leads back to a row.
function chainOf(row) {
  const steps = [row];
  for (;;) {
    const [next] = steps.at(-1).cause_rows;
    if (next === undefined || steps.includes(rows[next])) return steps;
    steps.push(rows[next]);
  }
}
