// The report of a history: one line for each tensor over the steps of a run, and the same numbers as tables.

const data = await readData();
const MAX_LINES = PALETTE.length;
const LABELS = { l2: "L2 norm", max: "largest value", min: "smallest value", mean: "mean", nans: "NaNs", infs: "infinities", zeros: "zeros" };
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [1200, 380, 74, 16, 14, 36];

const tensors = data.tensors.map((name, at) => ({ name, at, bad: sum("nans", at) + sum("infs", at) }));
const chosen = new Set();
let shownLines = [];
let cursor = { line: 0, step: data.steps.length - 1 };

function sum(stat, at) { return data.values[stat][at].reduce((total, value) => total + (value ?? 0), 0); }
const isBad = (tensor, step) => Boolean(data.values.nans[tensor.at][step] || data.values.infs[tensor.at][step]);
const valueAt = (tensor, step) => data.values[stat.value][tensor.at][step];
const numbersOf = (tensor) => data.values[stat.value][tensor.at].filter((value) => typeof value === "number");
const lastOf = (tensor) => valueAt(tensor, data.steps.length - 1);
const toKey = (value) => (value === null ? -Infinity : typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value);
const colorOf = (tensor) => pickColor(shownLines.indexOf(tensor));

const stat = make("select", { "aria-label": "Statistic", change: () => table.order() },
  Object.entries(LABELS).map(([name, text]) => make("option", { value: name }, text)));
const pattern = make("input", { type: "search", placeholder: "name, or a glob such as *.weight", "aria-label": "Filter by name", size: 34, input: () => filter() });
const logarithmic = make("input", { type: "checkbox", change: () => draw() });
const clear = make("button", { click: () => { chosen.clear(); table.order(); } }, "Show the first again");
const shown = make("span", { class: "soft", role: "status" });
const chart = makeSvg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "application", tabindex: 0, "aria-describedby": "chart-help" });
const values = make("div");

const table = new Grid("Tensors", [
  { name: "tensor", width: "minmax(200px, 1fr)", value: (row) => row.at, text: (row) => row.name, mark: (row) => makeSwatch(row) },
  { name: "first", width: "110px", isNumber: true, value: (row) => toKey(valueAt(row, 0)), text: (row) => formatNumber(valueAt(row, 0)) },
  { name: "last", width: "110px", isNumber: true, value: (row) => toKey(lastOf(row)), text: (row) => formatNumber(lastOf(row)) },
  { name: "lowest", width: "110px", isNumber: true, value: (row) => Math.min(...numbersOf(row)), text: (row) => formatExtreme(Math.min, row) },
  { name: "highest", width: "110px", isNumber: true, value: (row) => Math.max(...numbersOf(row)), text: (row) => formatExtreme(Math.max, row) },
  { name: "NaN, Inf", width: "90px", isNumber: true, value: (row) => row.bad, text: (row) => formatCount(row.bad) },
], { onSelect: (row) => toggle(row), onOrder: () => draw() });

function makeSwatch(tensor) {
  return shownLines.includes(tensor) ? make("i", { class: "swatch", "aria-hidden": "true", style: `background:${colorOf(tensor)}` }) : "";
}

function formatExtreme(pick, tensor) {
  const numbers = numbersOf(tensor);
  return numbers.length ? formatNumber(pick(...numbers)) : "";
}

function filter() {
  const matches = makeMatcher(pattern.value.trim());
  table.show(tensors.filter((tensor) => matches(tensor.name)));
}

// The tensors that were chosen are drawn; without any, the first rows of the table.
function toggle(tensor) {
  const isChosen = !chosen.delete(tensor);
  if (isChosen) {
    if (chosen.size === MAX_LINES) chosen.delete([...chosen][0]);
    chosen.add(tensor);
  }
  draw();
  announce(`${tensor.name}: ${isChosen ? "chosen" : "no longer chosen"}; ${shown.textContent}`);
}

function draw() {
  shownLines = chosen.size ? [...chosen] : table.rows.slice(0, MAX_LINES);
  cursor.line = Math.max(Math.min(cursor.line, shownLines.length - 1), 0);
  const lines = formatPlural(shownLines.length, "line");
  shown.textContent = chosen.size ? `${lines}: those that were chosen, of ${formatPlural(tensors.length, "tensor")}`
    : `${lines}: the first of ${formatPlural(table.rows.length, "row")} of the table below`;
  clear.hidden = !chosen.size;
  drawChart();
  drawValues();
  table.draw();
}

function findScale() {
  const drawn = shownLines.flatMap(numbersOf);
  const isLog = logarithmic.checked && drawn.some((value) => value > 0);
  const plotted = isLog ? drawn.filter((value) => value > 0).map(Math.log10) : drawn;
  let [low, high] = plotted.length ? [plotted.reduce((a, b) => Math.min(a, b)), plotted.reduce((a, b) => Math.max(a, b))] : [0, 1];
  if (low === high) { const margin = Math.abs(low) / 10 || 1; [low, high] = [low - margin, high + margin]; }
  const toY = (value) => TOP + ((high - (isLog ? Math.log10(value) : value)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const ticks = Array.from({ length: 5 }, (_, at) => low + ((high - low) * at) / 4).map((tick) => (isLog ? 10 ** tick : tick));
  return { toY, ticks, isDrawn: (value) => typeof value === "number" && (!isLog || value > 0) };
}

const [firstStep, lastStep] = [data.steps[0] ?? 0, data.steps.at(-1) ?? 0];
const toX = (number) => (firstStep === lastStep ? (LEFT + WIDTH - RIGHT) / 2 : LEFT + ((number - firstStep) / (lastStep - firstStep)) * (WIDTH - LEFT - RIGHT));

function drawChart() {
  const { toY, ticks, isDrawn } = findScale();
  const parts = ticks.flatMap((tick) => [
    makeSvg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: toY(tick), y2: toY(tick) }),
    makeSvg("text", { x: LEFT - 8, y: toY(tick) + 4, "text-anchor": "end" }, formatNumber(tick))]);
  const every = Math.ceil(data.steps.length / 8);
  const marked = data.steps.filter((_, at) => at % every === 0);
  parts.push(...marked.map((number) => makeSvg("text", { x: toX(number), y: HEIGHT - 12, "text-anchor": "middle" }, formatCount(number))));
  for (const tensor of shownLines) parts.push(...drawLine(tensor, toY, isDrawn));
  parts.push(makeSvg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM }));
  chart.replaceChildren(...parts);
  chart.setAttribute("aria-label", `${LABELS[stat.value]} of ${formatPlural(shownLines.length, "tensor")} over ${formatPlural(data.steps.length, "step")}`);
  placeCursor();
}

// A line has a gap where a step has no value, a point for each value on its own, and a red cross for NaN and Inf.
function drawLine(tensor, toY, isDrawn) {
  const color = colorOf(tensor);
  const parts = [];
  let path = "";
  data.steps.forEach((number, step) => {
    const value = valueAt(tensor, step), x = toX(number), isHere = isDrawn(value);
    if (isHere) {
      const isJoined = step > 0 && isDrawn(valueAt(tensor, step - 1));
      path += `${isJoined ? "L" : "M"}${x.toFixed(1)} ${toY(value).toFixed(1)}`;
      if (data.steps.length <= 60 || !isJoined) parts.push(makeSvg("circle", { cx: x, cy: toY(value), r: 2.5, fill: color }));
    }
    if (isBad(tensor, step)) {
      const y = isHere ? toY(value) : HEIGHT - BOTTOM;
      parts.push(makeSvg("path", { class: "cross", d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10` }));
    }
  });
  return [makeSvg("path", { class: "line", d: path || "M0 0", stroke: color, "data-name": tensor.name }), ...parts];
}

function describePoint() {
  const tensor = shownLines[cursor.line];
  if (!tensor || !data.steps.length) return "";
  const value = valueAt(tensor, cursor.step);
  const bad = isBad(tensor, cursor.step) ? `; ${data.values.nans[tensor.at][cursor.step]} NaN, ${data.values.infs[tensor.at][cursor.step]} Inf` : "";
  return `step ${formatCount(data.steps[cursor.step])}, ${tensor.name}: ${value === null ? "no value" : formatNumber(value)}${bad}`;
}

function placeCursor() {
  const line = chart.querySelector(".cursor");
  const x = data.steps.length ? toX(data.steps[cursor.step]) : LEFT;
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
  chart.querySelectorAll(".line").forEach((path, at) => path.classList.toggle("active", at === cursor.line));
}

chart.addEventListener("keydown", (event) => {
  const last = data.steps.length - 1;
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], Home: [-last, 0], End: [last, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (!(event.key in moves)) return;
  const [right, down] = moves[event.key];
  cursor.step = Math.max(Math.min(cursor.step + right, last), 0);
  cursor.line = Math.max(Math.min(cursor.line + down, shownLines.length - 1), 0);
  placeCursor();
  announce(describePoint());
  event.preventDefault();
});

chart.addEventListener("pointermove", (event) => {
  if (!data.steps.length || !shownLines.length) return;
  const box = chart.getBoundingClientRect(), scale = findScale();
  const x = ((event.clientX - box.left) / box.width) * WIDTH, y = ((event.clientY - box.top) / box.height) * HEIGHT;
  const nearest = (items, distance) => items.reduce((best, _, at) => (distance(at) < distance(best) ? at : best), 0);
  cursor.step = nearest(data.steps, (at) => Math.abs(toX(data.steps[at]) - x));
  cursor.line = nearest(shownLines, (at) => {
    const value = valueAt(shownLines[at], cursor.step);
    return scale.isDrawn(value) ? Math.abs(scale.toY(value) - y) : Infinity;
  });
  placeCursor();
  showTip(describePoint(), event.clientX, event.clientY);
});
chart.addEventListener("pointerleave", () => showTip(""));

// The numbers of the lines: a row for each step.
function drawValues() {
  const columns = [{ name: "step", width: "80px", isNumber: true, value: (step) => step, text: (step) => formatCount(data.steps[step]) }];
  shownLines.forEach((tensor) => columns.push({ name: tensor.name, width: "minmax(120px, 1fr)", isNumber: true,
    value: (step) => toKey(valueAt(tensor, step)), text: (step) => `${formatNumber(valueAt(tensor, step))}${isBad(tensor, step) ? " ✕" : ""}` }));
  const grid = new Grid(`${LABELS[stat.value]} by step`, columns);
  grid.element.style.height = `${Math.min(data.steps.length + 1, 14) * Grid.ROW + 6}px`;
  grid.show(data.steps.map((_, step) => step));
  values.replaceChildren(grid.element);
}

function describeFirstBad() {
  const step = data.steps.findIndex((_, at) => tensors.some((tensor) => isBad(tensor, at)));
  if (step < 0) return make("p", { id: "first" }, "No step has a NaN or an infinity in these tensors.");
  const bad = tensors.filter((tensor) => isBad(tensor, step));
  return make("p", { id: "first", class: "bad" }, `First step with NaN or Inf: ${formatCount(data.steps[step])}, in ${formatPlural(bad.length, "tensor")}, such as `, make("b", { class: "mono" }, bad[0].name));
}

addThemeButton();
document.getElementById("main").replaceChildren(
  make("p", { class: "mono" }, data.root),
  makeFacts([[formatCount(data.steps.length), data.steps.length === 1 ? "step" : "steps"], [formatCount(tensors.length), tensors.length === 1 ? "tensor" : "tensors"],
    [formatCount(firstStep), "first step"], [formatCount(lastStep), "last step"]]),
  describeFirstBad(),
  make("section", { "aria-labelledby": "lines" }, make("h2", { id: "lines" }, "Over the steps"),
    make("div", { class: "bar" }, stat, make("label", {}, logarithmic, " logarithmic"), shown, clear), chart,
    make("p", { class: "soft", id: "chart-help" }, "Left and right move by step, up and down by tensor. A red cross is a step with NaN or Inf; the other statistics are those of finite values, to 6 digits.")),
  make("section", { "aria-labelledby": "tensors" }, make("h2", { id: "tensors" }, "Tensors"),
    make("div", { class: "bar" }, pattern, make("span", { class: "soft" }, "Choose rows to draw them; sort to draw others first.")), table.element),
  make("section", { "aria-labelledby": "values" }, make("h2", { id: "values" }, "Values of the lines"), values));
table.element.style.height = `${Math.min(tensors.length + 1, 14) * Grid.ROW + 6}px`;
filter();
document.documentElement.dataset.ready = "true";
