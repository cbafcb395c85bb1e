// Shared by all reports: data, text, elements, colors, a table that draws only the rows that are seen.

async function readData() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const formatCount = (n) => n.toLocaleString("en-US");
const formatPlural = (n, noun) => `${formatCount(n)} ${noun}${n === 1 ? "" : "s"}`;

function formatSize(nbytes) {
  if (nbytes < 0) return "missing";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (nbytes >= 999.95 && at < units.length - 1) { nbytes /= 1000; at += 1; }
  return `${at ? nbytes.toFixed(1) : nbytes} ${units[at]}`;
}

function formatNumber(x) {
  if (x === null) return "";
  return typeof x === "string" ? x : x === 0 ? "0" : Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6 ? x.toExponential(2) : String(Number(x.toPrecision(4)));
}

// Children are elements or text; text is never parsed as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const PALETTE = ["#3f78c9", "#c26a1c", "#3b8f5a", "#a8508f", "#8a7a1f", "#7862c4", "#c04a4a", "#2f8d96", "#7a7f88"];
const pickColor = (index) => (index < PALETTE.length ? PALETTE[index] : `hsl(${(index * 137.5) % 360} 45% 48%)`);

const live = document.getElementById("live");
const announce = (text) => { live.textContent = text; };

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.hidden = !text;
  tip.textContent = text;
  tip.style.left = `${Math.max(Math.min(x + 14, innerWidth - tip.offsetWidth - 8), 0)}px`;
  tip.style.top = `${Math.max(Math.min(y + 14, innerHeight - tip.offsetHeight - 8), 0)}px`;
}

function addThemeButton() {
  const themes = ["auto", "light", "dark"];
  const button = make("button", { class: "theme", click: () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
    document.documentElement.dataset.theme = next;
    button.textContent = `Theme: ${next}`;
    dispatchEvent(new Event("theme"));
  } }, "Theme: auto");
  document.getElementById("header").append(button);
}

function makeFacts(facts) {
  return make("ul", { class: "facts" }, facts.map(([number, noun]) => make("li", {}, make("b", {}, number), noun)));
}

// A name on one line. If it does not fit, its middle is left out: the ends of `exp_avg` and `exp_avg_sq` differ.
function makeName(text, end = 14) {
  const letters = [...text], at = letters.length - Math.min(Math.ceil(letters.length / 2), end);
  return make("span", { class: "name" }, make("span", {}, letters.slice(0, at).join("")), make("span", {}, letters.slice(at).join("")));
}

const makeList = (facts) => make("dl", {}, facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));

// What was chosen last: beside the rest of the page, below it on a narrow screen.
function makePanel(label) {
  const element = make("section", { class: "detail", "aria-label": label, tabindex: 0 });
  const show = (...children) => { element.replaceChildren(...children.flat()); element.scrollTop = 0; };
  return { element, show, reveal: (...children) => { show(...children); element.scrollIntoView({ block: "nearest" }); } };
}

function makeTable(head, rows) {
  return make("table", {},
    make("thead", {}, make("tr", {}, head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell) => make("td", { class: "mono" }, cell))))));
}

function makeProblems(title, lines) {
  return make("section", { "aria-label": title }, make("div", { class: "problems", tabindex: 0 },
    make("h2", { class: "bad" }, title), make("ul", {}, lines.map((line) => make("li", { class: "mono" }, line)))));
}

// A pattern with * or ? is a glob over the full name; any other text matches anywhere in it.
function makeMatcher(pattern) {
  if (!/[*?]/.test(pattern)) return (name) => name.toLowerCase().includes(pattern.toLowerCase());
  const text = pattern.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".");
  const expression = new RegExp(`^${text}$`, "s");
  return (name) => expression.test(name);
}

// Columns: {name, width, value(row) to sort by, text(row), isNumber, mark(row): element}. Rows are any values.
class Grid {
  static ROW = 26;

  constructor(label, columns, { onSelect = () => {}, onOrder = () => {}, sort = null } = {}) {
    Object.assign(this, { columns, onSelect, onOrder, sort, rows: [], all: [], active: 0, selected: null });
    this.body = make("div", { role: "rowgroup", style: "position: relative" });
    this.body.style.minWidth = `${columns.reduce((sum, { width }) => sum + Number.parseFloat(width.match(/[\d.]+/)[0]) + 12, 4)}px`;
    this.head = make("div", { class: "row head", role: "row", style: `${this.template()}position: sticky; min-width: ${this.body.style.minWidth}` });
    this.element = make("div", { class: "scroll grid", role: "grid", tabindex: 0, "aria-label": label,
      scroll: () => this.draw(), keydown: (event) => this.move(event) }, this.head, this.body);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  template() { return `grid-template-columns: ${this.columns.map((column) => column.width).join(" ")}; `; }

  show(rows) {
    this.all = rows;
    this.order();
  }

  order() {
    this.rows = [...this.all];
    if (this.sort) {
      const { value } = this.columns[this.sort.column];
      const sign = this.sort.isFalling ? -1 : 1;
      const keys = new Map(this.rows.map((row) => [row, value(row)]));
      this.rows.sort((a, b) => sign * (keys.get(a) < keys.get(b) ? -1 : keys.get(a) > keys.get(b) ? 1 : 0));
    }
    this.element.setAttribute("aria-rowcount", this.rows.length + 1);
    this.body.style.height = `${this.rows.length * Grid.ROW}px`;
    this.active = Math.max(Math.min(this.active, this.rows.length - 1), 0);
    this.drawHead();
    this.draw();
    this.onOrder();
  }

  drawHead() {
    this.head.replaceChildren(...this.columns.map((column, at) => {
      const sorted = this.sort?.column === at ? (this.sort.isFalling ? "descending" : "ascending") : "none";
      const mark = { none: "", ascending: " ▲", descending: " ▼" }[sorted];
      return make("span", { role: "columnheader", "aria-sort": sorted, class: column.isNumber ? "number" : "" },
        make("button", { title: column.name, click: () => this.sortBy(at) }, column.name + mark));
    }));
  }

  sortBy(at) {
    const isFalling = this.sort?.column === at ? !this.sort.isFalling : Boolean(this.columns[at].isNumber);
    this.sort = { column: at, isFalling };
    this.order();
    this.head.querySelectorAll("button")[at].focus();
  }

  draw() {
    const first = Math.max(Math.floor(this.element.scrollTop / Grid.ROW) - 4, 0);
    const last = Math.min(first + Math.ceil(this.element.clientHeight / Grid.ROW) + 8, this.rows.length);
    const drawn = [];
    for (let at = first; at < last; at += 1) drawn.push(this.makeRow(at));
    this.body.replaceChildren(...drawn);
    if (this.rows.length) this.element.setAttribute("aria-activedescendant", `${this.id}-${this.active}`);
  }

  get id() { return (this.name ??= `grid${Math.random().toString(36).slice(2)}`); }

  makeRow(at) {
    const row = this.rows[at];
    return make("div", { class: `row${at === this.active ? " active" : ""}`, role: "row", id: `${this.id}-${at}`,
      "aria-rowindex": at + 2, "aria-selected": String(row === this.selected),
      style: `${this.template()}top: ${at * Grid.ROW}px`, click: () => this.choose(at) },
      this.columns.map((column) => make("span", { role: "gridcell", title: column.text(row),
        class: column.isNumber ? "number" : "mono" }, column.mark?.(row) ?? "", column.isNumber ? column.text(row) : makeName(column.text(row), column.end))));
  }

  choose(at) {
    this.active = at;
    this.selected = this.rows[at];
    this.draw();
    this.onSelect(this.selected);
  }

  // Marks a row that was chosen elsewhere, and scrolls to it.
  reveal(row) {
    this.selected = row;
    const at = this.rows.indexOf(row);
    if (at >= 0) this.scrollTo(at);
    this.draw();
  }

  scrollTo(at) {
    this.active = at;
    const top = at * Grid.ROW, height = this.element.clientHeight - 2 * Grid.ROW;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    if (top > this.element.scrollTop + height) this.element.scrollTop = top - height;
  }

  move(event) {
    if (event.target !== this.element || !this.rows.length) return;
    const page = Math.floor(this.element.clientHeight / Grid.ROW) - 2;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.rows.length, End: this.rows.length };
    if (event.key === "Enter") this.choose(this.active);
    else if (event.key in steps) {
      this.scrollTo(Math.max(Math.min(this.active + steps[event.key], this.rows.length - 1), 0));
      this.draw();
    } else return;
    event.preventDefault();
  }
}
