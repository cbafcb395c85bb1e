// The report of a comparison: layers by their relative distance, tensors, other values.

const data = await readData();
const [NAME, KIND, A, B, L2, RELATIVE, MAX_ABS, MAX_REL, NANS_A, NANS_B] = Array(10).keys();
const toNumber = (x) => (x === null ? -1 : x === "inf" || x === "nan" ? Infinity : x);
const joinBoth = (a, b) => (a === b ? a : [a, b].filter(Boolean).join(" / "));

function makeLayers() {
  if (!data.layers.length) return "";
  const rows = data.layers.map(([name, count, l2, relative, maxAbs]) => ({ name, count, l2, relative, maxAbs }));
  const finite = rows.map((row) => toNumber(row.relative)).filter((x) => x > 0 && x < Infinity);
  const [low, high] = [Math.log10(Math.min(...finite)), Math.log10(Math.max(...finite))];
  // The bar is logarithmic, from one decade below the least distance.
  const width = (row) => { const x = toNumber(row.relative); return x === Infinity ? 100 : x > 0 ? (100 * (Math.log10(x) - low + 1)) / (high - low + 1) : 0; };
  const grid = new Grid("Layers", [
    { name: "layer", width: "minmax(160px, 1fr)", value: (row) => rows.indexOf(row), text: (row) => row.name },
    { name: "tensors", width: "70px", isNumber: true, value: (row) => row.count, text: (row) => formatCount(row.count) },
    { name: "relative L2", width: "90px", isNumber: true, value: (row) => toNumber(row.relative), text: (row) => formatNumber(row.relative) },
    { name: "L2", width: "90px", isNumber: true, value: (row) => toNumber(row.l2), text: (row) => formatNumber(row.l2) },
    { name: "max abs", width: "90px", isNumber: true, value: (row) => toNumber(row.maxAbs), text: (row) => formatNumber(row.maxAbs) },
    { name: "", width: "240px", value: (row) => toNumber(row.relative), text: () => "",
      mark: (row) => make("i", { class: "swatch", "aria-hidden": "true", style: `background:${PALETTE[0]};width:${width(row)}%` }) },
  ], { onSelect: (row) => { pattern.value = row.name; filter(); } });
  grid.element.style.height = `${Math.min(data.layers.length + 1, 16) * Grid.ROW + 6}px`;
  grid.show(rows);
  return make("section", { "aria-labelledby": "layers" }, make("h2", { id: "layers" }, "By layer"), grid.element,
    make("p", { class: "soft" }, "Relative L2 is the norm of the difference divided by that of the second checkpoint, over the tensors that differ. Choose a layer to see its tensors."));
}

const pattern = make("input", { type: "search", placeholder: "name, or a glob such as *.weight", "aria-label": "Filter by name", size: 34, input: () => filter() });
const shown = make("span", { class: "soft", role: "status" });
const byNumber = (name, at) => ({ name, width: "90px", isNumber: true, value: (row) => toNumber(row[at]), text: (row) => formatNumber(row[at]) });
const grid = new Grid("Tensors that differ", [
  { name: "tensor", width: "minmax(200px, 1fr)", value: (row) => data.tensors.indexOf(row), text: (row) => row[NAME] },
  { name: "kind", width: "80px", value: (row) => row[KIND], text: (row) => row[KIND] },
  { name: "dtype, shape", width: "220px", value: (row) => row[A], text: (row) => joinBoth(row[A], row[B]) },
  byNumber("relative L2", RELATIVE), byNumber("L2", L2), byNumber("max abs", MAX_ABS), byNumber("max rel", MAX_REL),
  { name: "NaN", width: "90px", isNumber: true, value: (row) => row[NANS_A] + row[NANS_B], text: (row) => (row[L2] === null ? "" : `${row[NANS_A]} / ${row[NANS_B]}`) },
], { sort: { column: 3, isFalling: true }, onSelect: (row) => announce(`${row[NAME]}: ${row[KIND]}, relative L2 ${formatNumber(row[RELATIVE])}`) });

function filter() {
  const matches = makeMatcher(pattern.value.trim());
  const rows = data.tensors.filter((row) => matches(row[NAME]));
  grid.show(rows);
  shown.textContent = formatPlural(rows.length, "tensor");
}

const first = data.tensors[0];
const unequal = data.tensors.length + data.values.length;
addThemeButton();
document.getElementById("main").replaceChildren(
  make("p", { class: "mono" }, `a: ${data.a}`, make("br"), `b: ${data.b}`),
  makeFacts([[formatCount(data.compared), "tensors in both"], [formatCount(data.equal), "equal tensors"], [formatCount(unequal), unequal === 1 ? "difference" : "differences"],
    [formatCount(data.compared_values), "other values in both"], [formatCount(data.equal_values), "equal values"]]),
  data.same ? make("p", {}, "Everything that was asked for was compared, and is equal.") : "",
  first ? make("p", { id: "first" }, "First difference, by layer: ", make("b", { class: "mono" }, first[NAME]), ` (${[first[KIND], first[L2] === null ? "" : `relative L2 ${formatNumber(first[RELATIVE])}`].filter(Boolean).join(", ")})`) : "",
  data.not_compared.length ? makeProblems("Not compared", data.not_compared.map(([name, why]) => `${name}: ${why}`)) : "",
  data.warnings.length ? makeProblems("Warnings", data.warnings) : "",
  makeLayers(),
  data.tensors.length ? make("section", { "aria-labelledby": "tensors" }, make("h2", { id: "tensors" }, "Tensors that differ"), make("div", { class: "bar" }, pattern, shown), grid.element) : "",
  data.values.length ? make("section", { "aria-labelledby": "values" }, make("h2", { id: "values" }, "Other values that differ"), makeTable(["name", "kind", "a", "b"], data.values)) : "",
  data.left_out.length ? make("details", {}, make("summary", {}, `Left out (${formatCount(data.left_out.length)})`), makeTable(["name"], data.left_out.map((name) => [name]))) : "");
filter();
document.documentElement.dataset.ready = "true";
