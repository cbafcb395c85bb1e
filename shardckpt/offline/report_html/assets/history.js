// The report of a history: lines for tensors over the steps of a run, a panel for each scale, and the same numbers as tables.

const data = await readData();
const MAX_LINES = PALETTE.length;
const LABELS = { l2: "L2 norm", max: "largest value", min: "smallest value", mean: "mean", nans: "NaNs", infs: "infinities", zeros: "zeros" };
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [260, 66, 24, 14, 30];
const LOG_RANGE = 100; // from this ratio of the largest to the smallest number, an axis is logarithmic by itself

const tensors = data.tensors.map((name, at) => ({ name, at, scale: data.scale_of[at], bad: sum("nans", at) + sum("infs", at) }));
const chosen = new Set();

function sum(stat, at) { return data.values[stat][at].reduce((total, value) => total + (value ?? 0), 0); }
const isBad = (tensor, step) => Boolean(data.values.nans[tensor.at][step] || data.values.infs[tensor.at][step]);
const valueAt = (tensor, step) => data.values[stat.value][tensor.at][step];
const numbersOf = (tensor) => data.values[stat.value][tensor.at].filter((value) => typeof value === "number");
const lastOf = (tensor) => valueAt(tensor, data.steps.length - 1);
const toKey = (value) => (value === null ? -Infinity : typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value);

const makeSelect = (label, options, change) => make("select", { "aria-label": label, change }, Object.entries(options).map(([value, text]) => make("option", { value }, text)));
const stat = makeSelect("Statistic", LABELS, () => table.order());
const axis = makeSelect("Axis", { auto: "axis by range", linear: "linear axis", log: "logarithmic axis" }, () => draw());
const pattern = make("input", { type: "search", placeholder: "name, or a glob such as *.weight", "aria-label": "Filter by name", size: 34, input: () => filter() });
const clear = make("button", { click: () => { chosen.clear(); table.order(); } }, "Show the first again");
const shown = make("span", { class: "soft", role: "status" });

const table = new Grid("Tensors", [
  { name: "tensor", width: "minmax(180px, 1fr)", value: (row) => row.at, text: (row) => row.name, mark: (row) => charts[row.scale].makeSwatch(row) },
  { name: "first", width: "90px", isNumber: true, value: (row) => toKey(valueAt(row, 0)), text: (row) => formatNumber(valueAt(row, 0)) },
  { name: "last", width: "90px", isNumber: true, value: (row) => toKey(lastOf(row)), text: (row) => formatNumber(lastOf(row)) },
  { name: "lowest", width: "90px", isNumber: true, value: (row) => Math.min(...numbersOf(row)), text: (row) => formatExtreme(Math.min, row) },
  { name: "highest", width: "90px", isNumber: true, value: (row) => Math.max(...numbersOf(row)), text: (row) => formatExtreme(Math.max, row) },
  { name: "NaN, Inf", width: "70px", isNumber: true, value: (row) => row.bad, text: (row) => formatCount(row.bad) },
], { onSelect: (row) => toggle(row), onOrder: () => draw() });

function formatExtreme(pick, tensor) {
  const numbers = numbersOf(tensor);
  return numbers.length ? formatNumber(pick(...numbers)) : "";
}

function filter() {
  const matches = makeMatcher(pattern.value.trim());
  table.show(tensors.filter((tensor) => matches(tensor.name)));
}

// The tensors that were chosen are drawn; in a panel without any, the first rows of the table.
function toggle(tensor) {
  const isChosen = !chosen.delete(tensor);
  const peers = [...chosen].filter((each) => each.scale === tensor.scale);
  if (isChosen) {
    if (peers.length === MAX_LINES) chosen.delete(peers[0]);
    chosen.add(tensor);
  }
  draw();
  announce(`${tensor.name}: ${isChosen ? "chosen" : "no longer chosen"}; ${shown.textContent}`);
}

function draw() {
  for (const chart of charts) chart.choose();
  const lines = formatPlural(charts.reduce((count, chart) => count + chart.lines.length, 0), "line");
  shown.textContent = `${lines} of ${formatPlural(tensors.length, "tensor")}${chosen.size ? `, ${formatCount(chosen.size)} chosen` : ""}`;
  clear.hidden = !chosen.size;
  table.draw();
}

const [firstStep, lastStep] = [data.steps[0] ?? 0, data.steps.at(-1) ?? 0];

// Round numbers from `low` to `high`, about `count`.
function listTicks(low, high, count, least = 0) {
  const base = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = Math.max([1, 2, 5, 10].map((factor) => factor * base).find((each) => each >= (high - low) / count), least);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(Math.floor(high / step + 1e-9) - first + 1, 0) }, (_, at) => (first + at) * step);
}

// The lines of the tensors whose values have one scale.
class Chart {
  constructor(name, scale) {
    Object.assign(this, { name, scale, lines: [], cursor: { line: 0, step: data.steps.length - 1 } });
    this.svg = makeSvg("svg", { class: "chart", height: HEIGHT, role: "application", tabindex: 0, "aria-describedby": "chart-help" });
    this.legend = make("div", { class: "legend" });
    this.values = make("details", { toggle: () => this.drawValues() }, make("summary", {}, "Values"));
    this.svg.addEventListener("keydown", (event) => this.move(event));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => showTip(""));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.element = make("section", { "aria-label": name }, make("h3", {}, name), this.svg, this.legend, this.values);
  }

  makeSwatch(tensor) {
    const at = this.lines.indexOf(tensor);
    return at < 0 ? "" : make("i", { class: "swatch", "aria-hidden": "true", style: `background:${pickColor(at)}` });
  }

  choose() {
    const mine = [...chosen].filter((tensor) => tensor.scale === this.scale);
    this.lines = mine.length ? mine : table.rows.filter((tensor) => tensor.scale === this.scale).slice(0, MAX_LINES);
    this.cursor.line = Math.max(Math.min(this.cursor.line, this.lines.length - 1), 0);
    this.element.hidden = !this.lines.length;
    this.legend.replaceChildren(...this.lines.map((tensor) => make("span", {}, this.makeSwatch(tensor), makeName(tensor.name))));
    this.draw();
    this.drawValues();
  }

  findScale() {
    const drawn = this.lines.flatMap(numbersOf);
    const above = drawn.filter((value) => value > 0);
    const most = above.reduce((a, b) => Math.max(a, b), 0), least = above.reduce((a, b) => Math.min(a, b), Infinity);
    const isLog = above.length && (axis.value === "log" || (axis.value === "auto" && most / least >= LOG_RANGE && drawn.every((value) => value >= 0)));
    let [low, high] = isLog ? [Math.log10(least), Math.log10(most)] : drawn.length ? [drawn.reduce((a, b) => Math.min(a, b)), drawn.reduce((a, b) => Math.max(a, b))] : [0, 1];
    if (low === high) { const margin = Math.abs(low) / 10 || 1; [low, high] = [low - margin, high + margin]; }
    const toY = (value) => TOP + ((high - (isLog ? Math.log10(value) : value)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const ticks = isLog && high - low >= 1 ? listTicks(low, high, 5, 1).map((tick) => 10 ** tick) : isLog ? [10 ** low, 10 ** high] : listTicks(low, high, 5);
    return { toY, ticks, isLog, isDrawn: (value) => typeof value === "number" && (!isLog || value > 0) };
  }

  toX(number) {
    const right = Math.max(this.svg.clientWidth, 240) - RIGHT;
    return firstStep === lastStep ? (LEFT + right) / 2 : LEFT + ((number - firstStep) / (lastStep - firstStep)) * (right - LEFT);
  }

  draw() {
    const { toY, ticks, isLog, isDrawn } = this.findScale();
    const right = Math.max(this.svg.clientWidth, 240) - RIGHT;
    const parts = ticks.flatMap((tick) => [
      makeSvg("line", { class: "axis", x1: LEFT, x2: right, y1: toY(tick), y2: toY(tick) }),
      makeSvg("text", { x: LEFT - 8, y: toY(tick) + 4, "text-anchor": "end" }, formatNumber(tick))]);
    const every = Math.ceil(data.steps.length / Math.max(Math.floor((right - LEFT) / 80), 1));
    const marked = data.steps.filter((_, at) => at % every === 0);
    parts.push(...marked.map((number) => makeSvg("text", { x: this.toX(number), y: HEIGHT - 10, "text-anchor": "middle" }, formatCount(number))));
    this.lines.forEach((tensor, at) => parts.push(...this.drawLine(tensor, pickColor(at), toY, isDrawn)));
    parts.push(makeSvg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM }));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${LABELS[stat.value]} of ${formatPlural(this.lines.length, "tensor")} over ${formatPlural(data.steps.length, "step")}, ${this.name}${isLog ? ", logarithmic" : ""}`);
    this.placeCursor();
  }

  // A line has a gap where a step has no value, a point for each value on its own, and a red cross for NaN and Inf.
  drawLine(tensor, color, toY, isDrawn) {
    const parts = [];
    let path = "";
    data.steps.forEach((number, step) => {
      const value = valueAt(tensor, step), x = this.toX(number), isHere = isDrawn(value);
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

  describePoint() {
    const { line, step } = this.cursor, tensor = this.lines[line];
    if (!tensor || !data.steps.length) return "";
    const value = valueAt(tensor, step);
    const bad = isBad(tensor, step) ? `; ${data.values.nans[tensor.at][step]} NaN, ${data.values.infs[tensor.at][step]} Inf` : "";
    return `step ${formatCount(data.steps[step])}, ${tensor.name}: ${value === null ? "no value" : formatNumber(value)}${bad}`;
  }

  placeCursor() {
    const line = this.svg.querySelector(".cursor"), x = data.steps.length ? this.toX(data.steps[this.cursor.step]) : LEFT;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    this.svg.querySelectorAll(".line").forEach((path, at) => path.classList.toggle("active", at === this.cursor.line));
  }

  move(event) {
    const last = data.steps.length - 1;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], Home: [-last, 0], End: [last, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in moves)) return;
    const [right, down] = moves[event.key];
    this.cursor.step = Math.max(Math.min(this.cursor.step + right, last), 0);
    this.cursor.line = Math.max(Math.min(this.cursor.line + down, this.lines.length - 1), 0);
    this.placeCursor();
    announce(this.describePoint());
    event.preventDefault();
  }

  point(event) {
    if (!data.steps.length || !this.lines.length) return;
    const box = this.svg.getBoundingClientRect(), scale = this.findScale();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const nearest = (items, distance) => items.reduce((best, _, at) => (distance(at) < distance(best) ? at : best), 0);
    this.cursor.step = nearest(data.steps, (at) => Math.abs(this.toX(data.steps[at]) - x));
    this.cursor.line = nearest(this.lines, (at) => {
      const value = valueAt(this.lines[at], this.cursor.step);
      return scale.isDrawn(value) ? Math.abs(scale.toY(value) - y) : Infinity;
    });
    this.placeCursor();
    showTip(this.describePoint(), event.clientX, event.clientY);
  }

  // The numbers of the lines: a row for each step.
  drawValues() {
    const columns = [{ name: "step", width: "80px", isNumber: true, value: (step) => step, text: (step) => formatCount(data.steps[step]) }];
    this.lines.forEach((tensor) => columns.push({ name: tensor.name, width: "minmax(120px, 1fr)", isNumber: true,
      value: (step) => toKey(valueAt(tensor, step)), text: (step) => `${formatNumber(valueAt(tensor, step))}${isBad(tensor, step) ? " ✕" : ""}` }));
    const grid = this.values.open ? new Grid(`${LABELS[stat.value]} by step, ${this.name}`, columns) : null;
    this.values.replaceChildren(this.values.firstChild, grid?.element ?? "");
    if (grid) grid.element.style.height = `${Math.min(data.steps.length + 1, 14) * Grid.ROW + 6}px`;
    grid?.show(data.steps.map((_, step) => step));
  }
}

function describeFirstBad() {
  const step = data.steps.findIndex((_, at) => tensors.some((tensor) => isBad(tensor, at)));
  if (step < 0) return make("p", { id: "first" }, "No step has a NaN or an infinity in these tensors.");
  const bad = tensors.filter((tensor) => isBad(tensor, step));
  return make("p", { id: "first", class: "bad" }, `First step with NaN or Inf: ${formatCount(data.steps[step])}, in ${formatPlural(bad.length, "tensor")}, such as `, make("b", { class: "mono" }, bad[0].name));
}

const charts = data.scales.map((name, at) => new Chart(name, at));
addThemeButton();
document.getElementById("main").replaceChildren(
  make("p", { class: "mono" }, data.root),
  makeFacts([[formatCount(data.steps.length), data.steps.length === 1 ? "step" : "steps"], [formatCount(tensors.length), tensors.length === 1 ? "tensor" : "tensors"],
    [formatCount(firstStep), "first step"], [formatCount(lastStep), "last step"]]),
  describeFirstBad(),
  data.warnings.length ? makeProblems("Warnings", data.warnings) : "",
  make("section", { "aria-labelledby": "lines" }, make("h2", { id: "lines" }, "Over the steps"),
    make("div", { class: "bar" }, pattern, stat, axis, shown, clear), make("div", { class: "charts" }, charts.map((chart) => chart.element)),
    make("p", { class: "soft", id: "chart-help" }, "Left and right move by step, up and down by tensor. A red cross is a step with NaN or Inf; the other statistics are those of finite values, to 6 digits. An axis is logarithmic if its largest number is 100 times the smallest; it has no place for 0.")),
  make("section", { "aria-labelledby": "tensors" }, make("h2", { id: "tensors" }, "Tensors"),
    make("p", { class: "soft" }, "Choose rows to draw them; sort to draw others first."), table.element));
table.element.style.height = `${Math.min(tensors.length + 1, 14) * Grid.ROW + 6}px`;
filter();
document.documentElement.dataset.ready = "true";
