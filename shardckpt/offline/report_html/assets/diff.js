// The report of a comparison: layers by their relative distance, tensors, other values. All columns fit a phone.

const data = await readData();
const [NAME, KIND, A, B, L2, RELATIVE, MAX_ABS, MAX_REL, NANS_A, NANS_B] = Array(10).keys();
const toNumber = (x) => (x === null ? -1 : x === "inf" || x === "nan" ? Infinity : x);
const joinBoth = (a, b) => (a === b ? a : [a, b].filter(Boolean).join(" / "));
const counters = new Set(data.counters.map((at) => data.tensors[at]));
const panel = makePanel("Chosen tensor or layer");

function makeLayers() {
  if (!data.layers.length) return "";
  const rows = data.layers.map(([name, count, l2, relative, maxAbs]) => ({ name, count, l2, relative, maxAbs }));
  const finite = rows.map((row) => toNumber(row.relative)).filter((x) => x > 0 && x < Infinity);
  const [low, high] = [Math.min, Math.max].map((pick) => Math.log10(finite.reduce((a, b) => pick(a, b), finite[0])));
  // The bar is logarithmic, from one decade below the least distance.
  const width = (row) => { const x = toNumber(row.relative); return x === Infinity ? 100 : x > 0 ? (100 * (Math.log10(x) - low + 1)) / (high - low + 1) : 0; };
  const grid = new Grid("Layers", [
    { name: "layer", width: "minmax(110px, 2fr)", value: (row) => rows.indexOf(row), text: (row) => row.name },
    { name: "tensors", width: "60px", isNumber: true, value: (row) => row.count, text: (row) => formatCount(row.count) },
    { name: "rel L2", width: "72px", isNumber: true, value: (row) => toNumber(row.relative), text: (row) => formatNumber(row.relative) },
    { name: "distance", width: "minmax(60px, 1fr)", value: (row) => toNumber(row.relative), text: () => "",
      mark: (row) => make("i", { class: "swatch", "aria-hidden": "true", style: `background:${PALETTE[0]};width:${width(row)}%` }) },
  ], { onSelect: (row) => {
    pattern.value = row.name;
    filter();
    panel.reveal(make("h3", { class: "mono" }, row.name), makeList([["tensors", formatCount(row.count)], ["relative L2", formatNumber(row.relative)], ["L2", formatNumber(row.l2)], ["max abs", formatNumber(row.maxAbs)]]));
  } });
  grid.element.style.height = `${Math.min(data.layers.length + 1, 16) * Grid.ROW + 6}px`;
  grid.show(rows);
  return make("section", { "aria-labelledby": "layers" }, make("h2", { id: "layers" }, "By layer"), grid.element,
    make("p", { class: "soft" }, "Relative L2 is the norm of the difference divided by that of the second checkpoint, over the tensors that differ. Choose a layer to see its tensors.",
      counters.size ? ` ${formatPlural(counters.size, "counter")} in no layer, such as ${[...counters][0][NAME]}.` : ""));
}

const pattern = make("input", { type: "search", placeholder: "name, or a glob such as *.weight", "aria-label": "Filter by name", size: 34, input: () => filter() });
const shown = make("span", { class: "soft", role: "status" });
const byNumber = (name, at) => ({ name, width: "68px", isNumber: true, value: (row) => toNumber(row[at]), text: (row) => formatNumber(row[at]) });
const grid = new Grid("Tensors that differ", [
  { name: "tensor", width: "minmax(100px, 1fr)", end: 9, value: (row) => data.tensors.indexOf(row), text: (row) => row[NAME] },
  { name: "kind", width: "70px", value: (row) => row[KIND], text: (row) => row[KIND] },
  byNumber("rel L2", RELATIVE), byNumber("max abs", MAX_ABS),
], { sort: { column: 2, isFalling: true }, onSelect: (row) => { panel.reveal(describeTensor(row)); announce(`${row[NAME]}: ${row[KIND]}, relative L2 ${formatNumber(row[RELATIVE])}`); } });

function describeTensor(row) {
  const facts = [["kind", row[KIND]], ["a", row[A]], ["b", row[B]], ["relative L2", formatNumber(row[RELATIVE])], ["L2", formatNumber(row[L2])],
    ["max abs", formatNumber(row[MAX_ABS])], ["max rel", formatNumber(row[MAX_REL])], ["NaN", row[MAX_ABS] === null ? "" : `${row[NANS_A]} / ${row[NANS_B]}`]];
  return [make("h3", { class: "mono" }, row[NAME]), makeList(facts.filter(([, text]) => text !== ""))];
}

function filter() {
  const matches = makeMatcher(pattern.value.trim());
  const rows = data.tensors.filter((row) => matches(row[NAME]));
  grid.show(rows);
  shown.textContent = formatPlural(rows.length, "tensor");
}

const first = data.tensors.find((row) => !counters.has(row)) ?? data.tensors[0];
const unequal = data.tensors.length + data.values.length;
if (first) panel.show(describeTensor(first));
addThemeButton();
document.getElementById("main").replaceChildren(
  make("p", { class: "mono" }, `a: ${data.a}`, make("br"), `b: ${data.b}`),
  makeFacts([[formatCount(data.compared), "tensors in both"], [formatCount(data.equal), "equal tensors"], [formatCount(unequal), unequal === 1 ? "difference" : "differences"],
    [formatCount(data.compared_values), "other values in both"], [formatCount(data.equal_values), "equal values"]]),
  data.same ? make("p", {}, "Everything that was asked for was compared, and is equal.") : "",
  first ? make("p", { id: "first" }, "First difference, by layer: ", make("b", { class: "mono" }, first[NAME]), ` (${[first[KIND], first[L2] === null ? "" : `relative L2 ${formatNumber(first[RELATIVE])}`].filter(Boolean).join(", ")})`) : "",
  data.not_compared.length ? makeProblems("Not compared", data.not_compared.map(([name, why]) => `${name}: ${why}`)) : "",
  data.warnings.length ? makeProblems("Warnings", data.warnings) : "",
  first ? make("div", { class: "split" }, makeLayers(), panel.element,
    make("section", { "aria-labelledby": "tensors" }, make("h2", { id: "tensors" }, "Tensors that differ"), make("div", { class: "bar" }, pattern, shown), grid.element)) : "",
  data.values.length ? make("section", { "aria-labelledby": "values" }, make("h2", { id: "values" }, "Other values that differ"), makeTable(["name", "kind", "a", "b"], data.values)) : "",
  data.left_out.length ? make("details", {}, make("summary", {}, `Left out (${formatCount(data.left_out.length)})`), makeTable(["name"], data.left_out.map((name) => [name]))) : "");
filter();
document.documentElement.dataset.ready = "true";
