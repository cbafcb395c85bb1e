// The report of one checkpoint: sizes by name, bytes by file, tensors.

const data = await readData();
const { segments } = data.names;
const tensors = data.names.tensors.map((coded, index) => {
  const keys = coded.map((at) => segments[at]);
  return { index, keys, name: keys.join("."), dtype: data.dtypes[data.tensors.dtype[index]],
    shape: data.tensors.shape[index], nbytes: data.tensors.nbytes[index], count: data.tensors.pieces[index],
    part: "other", tiedTo: null, pieces: [], faults: [] };
});
for (const [tied, kept] of data.ties) tensors[tied].tiedTo = tensors[kept];
for (const fault of data.faults) tensors[fault.tensor].faults.push(fault);

const prefixes = Object.entries(data.parts).filter(([part]) => part !== "other")
  .flatMap(([part, places]) => places.map((place) => [place, part])).sort((a, b) => b[0].length - a[0].length);
const isUnder = (name, prefix) => !prefix || name === prefix || name.startsWith(`${prefix}.`);
for (const tensor of tensors) tensor.part = prefixes.find(([prefix]) => isUnder(tensor.name, prefix))?.[1] ?? "other";
const parts = [...new Set(tensors.map((tensor) => tensor.part))];
const colorOfPart = (part) => pickColor(parts.indexOf(part));

const files = data.files.map((file, index) => ({ ...file, index, pieces: [], ends: [] }));
const pieces = data.pieces.tensor.map((at, index) => {
  const tensor = tensors[at], box = data.pieces.box[index];
  const piece = { index, tensor, file: files[data.pieces.file[index]], offset: data.pieces.offset[index],
    nbytes: data.pieces.nbytes[index], isExact: Boolean(data.pieces.is_exact[index]),
    start: box ? box[0] : tensor.shape.map(() => 0), size: box ? box[1] : tensor.shape };
  piece.end = piece.offset + piece.nbytes;
  tensor.pieces.push(piece);
  piece.file.pieces.push(piece);
  return piece;
});
for (const file of files) {
  file.pieces.sort((a, b) => a.offset - b.offset || a.end - b.end);
  let end = 0;
  file.ends = file.pieces.map((piece) => (end = Math.max(end, piece.end)));
  file.extent = Math.max(file.nbytes, end);
}

const formatShape = (shape) => shape.join("x") || "scalar";
const formatBox = (piece) => `[${piece.start.map((at, d) => `${at}:${at + piece.size[d]}`).join(", ")}]`;
const formatFile = (file) => (file.rank === null ? file.name : `rank ${file.rank} · ${file.name}`);
const formatBytes = (piece) => `bytes ${formatCount(piece.offset)} to ${formatCount(piece.end)}${piece.isExact ? "" : ", shared or compressed"}`;

let selected = null;
const views = [];
function select(tensor) {
  selected = tensor;
  for (const view of views) view(tensor);
  if (location.protocol !== "about:") history.replaceState(null, "", tensor ? `#${encodeURIComponent(tensor.name)}` : "#");
}

// ---- sizes by name -------------------------------------------------------------------------------------------------

const makeNode = (name) => ({ key: name, name, full: name, children: new Map(), nbytes: 0, count: 0, parts: new Set(), tensor: null });

function growTree(rows) {
  const root = makeNode("");
  for (const tensor of rows) {
    let node = root;
    const nbytes = tensor.tiedTo ? 0 : tensor.nbytes;
    for (const key of [null, ...tensor.keys]) {
      if (key !== null) {
        if (!node.children.has(key)) node.children.set(key, makeNode(key));
        node = node.children.get(key);
      }
      node.nbytes += nbytes;
      node.count += 1;
      node.parts.add(tensor.part);
    }
    node.tensor = tensor;
  }
  joinSingles(root);
  return root;
}

// A node with a single child becomes that child, so that each click shows something new.
function joinSingles(root) {
  for (const stack = [root]; stack.length;) {
    const node = stack.pop(), names = [node.name];
    if (node.tensor && node.children.size) {
      const { tensor } = node, nbytes = tensor.tiedTo ? 0 : tensor.nbytes;
      node.children.set(null, { ...makeNode(node.name), nbytes, count: 1, parts: new Set([tensor.part]), tensor });
      node.tensor = null;
    }
    while (node.children.size === 1 && (node !== root || [...node.children.values()][0].children.size)) {
      const [child] = node.children.values();
      names.push(child.name);
      [node.children, node.tensor] = [child.children, child.tensor];
      if (node.tensor) break;
    }
    node.name = names.filter(Boolean).join(".") || (node === root ? "" : '""');
    node.full = node === root ? node.name : [node.above, node.name].filter(Boolean).join(".");
    for (const child of node.children.values()) { child.above = node.full; stack.push(child); }
  }
}

// Squarified layout (Bruls, Huizing, van Wijk 2000): rows are filled while the worst aspect ratio falls.
function squarify(sizes, x, y, width, height) {
  const boxes = [];
  let total = sizes.reduce((sum, size) => sum + size, 0);
  for (let at = 0; at < sizes.length && total > 0;) {
    const side = Math.min(width, height), area = (width * height) / total;
    let sum = 0, worst = Infinity, end = at;
    for (; end < sizes.length; end += 1) {
      const next = sum + sizes[end], depth = (next * area) / side;
      const ratio = Math.max(...[sizes[at], sizes[end]].map((size) => { const length = (size * area) / depth; return Math.max(length / depth, depth / length); }));
      if (ratio > worst) break;
      [sum, worst] = [next, ratio];
    }
    const depth = (sum * area) / side;
    let along = 0;
    for (; at < end; at += 1) {
      const length = (sizes[at] * area) / depth;
      boxes.push(width >= height ? { x, y: y + along, width: depth, height: length } : { x: x + along, y, width: length, height: depth });
      along += length;
    }
    if (width >= height) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    total -= sum;
  }
  return boxes;
}

const NAME_HEIGHT = 18, LETTER = 7.2, LEAST_AREA = 60 * 24, WIDER = 2.2, MOST_GROUPS = 40;
const hasRoom = ({ name }, box) => box.height >= NAME_HEIGHT - 2 && box.width >= Math.min(name.length, 6) * LETTER + 10;

// Children in saved order. Those below `least` bytes become groups of neighbors, which open as any other box.
function groupChildren(node, least) {
  const children = [...node.children.values()].filter((child) => child.nbytes > 0);
  const small = children.filter((child) => child.nbytes < least);
  if (small.length < 2) return children;
  const full = Math.max(least, small.reduce((sum, child) => sum + child.nbytes, 0) / MOST_GROUPS);
  const groups = [];
  for (const child of small) {
    if (!groups.length || groups.at(-1).nbytes >= full) groups.push({ ...makeNode(""), first: child });
    const group = groups.at(-1);
    group.children.set(child, child);
    group.nbytes += child.nbytes;
    group.count += child.count;
    for (const part of child.parts) group.parts.add(part);
    group.last = child;
  }
  for (const group of groups) {
    group.name = `${group.first.key} – ${group.last.key}`;
    group.full = [node.full, group.name].filter(Boolean).join(".");
  }
  return [...children.filter((child) => child.nbytes >= least), ...groups.map((group) => (group.first === group.last ? group.first : group))];
}

// Boxes of a node's children, the largest first, wider than high as names are. Small ones are grouped until the names of
// nearly all bytes fit; a node whose children have no room for names is not divided, unless it must be.
function layOut(node, x, y, width, height, mustDivide = false) {
  if (!node.nbytes || width < 40 || height < NAME_HEIGHT) return [];
  const floor = (LEAST_AREA * node.nbytes) / (width * height), boxes = [];
  for (let least = Math.max(floor, node.nbytes / 200); least < node.nbytes / 4; least *= 2) {
    const children = groupChildren(node, least).sort((a, b) => b.nbytes - a.nbytes);
    const sizes = children.map((child) => Math.max(child.nbytes, floor));
    const found = squarify(sizes, 0, 0, width / WIDER, height)
      .map((box, at) => ({ x: x + box.x * WIDER, y: y + box.y, width: box.width * WIDER, height: box.height, node: children[at] }));
    const nameless = found.reduce((sum, box) => sum + (hasRoom(box.node, box) ? 0 : box.node.nbytes), 0);
    if (nameless < node.nbytes / 8) return found.length > 1 || mustDivide ? found : [];
    if (!boxes.length && mustDivide) boxes.push(...found);
  }
  return boxes;
}

const SEVERAL_PARTS = PALETTE.at(-1);
const colorOfNode = (node) => (node.parts.size === 1 ? colorOfPart([...node.parts][0]) : SEVERAL_PARTS);

function listTensors(node) {
  const found = [];
  for (const stack = [node]; stack.length;) {
    const each = stack.pop();
    if (each.tensor) found.push(each.tensor);
    for (const child of each.children.values()) stack.push(child);
  }
  return found;
}

function makeTree() {
  const crumbs = make("nav", { class: "bar crumbs", "aria-label": "Path" });
  const paths = new WeakMap(); // element to the nodes from the root to its own
  const find = (event) => paths.get(event.target.closest(".box"))?.at(-1);
  const area = make("div", { class: "tree", role: "group", "aria-label": "Sizes by name", mouseleave: () => showTip(""),
    keydown: (event) => { if ((event.key === "Escape" || event.key === "Backspace") && shown.length > 1) { event.preventDefault(); open(shown.slice(0, -1)); } },
    mousemove: (event) => { const node = find(event); showTip(node ? describe(node) : "", event.clientX, event.clientY); },
    click: (event) => {
      const node = find(event);
      showTip("");
      if (node?.tensor) select(node.tensor);
      else if (node) open(paths.get(event.target.closest(".box")));
    } });
  let shown = [makeNode("")];

  const describe = (node) => `${node.full || "all"}: ${formatSize(node.nbytes)}, ${((100 * node.nbytes) / (shown[0].nbytes || 1)).toFixed(1)} % of all, ${formatPlural(node.count, "tensor")}`;

  function open(path) {
    const from = shown.at(path.length);
    shown = path;
    draw();
    focus(from);
    panel.show(describeNode(path.at(-1)));
    announce(describe(path.at(-1)));
  }

  function focus(node) {
    const buttons = [...area.children];
    (buttons.find((button) => paths.get(button).at(-1).full === node?.full) ?? buttons[0])?.focus();
  }

  function draw() {
    const node = shown.at(-1), focused = paths.get(document.activeElement);
    crumbs.replaceChildren(...shown.flatMap((each, at) => [at ? "›" : "", make("button", { click: () => open(shown.slice(0, at + 1)), "aria-current": each === node ? "true" : null }, each.name || "all")]),
      make("span", { class: "soft" }, `${formatSize(node.nbytes)}, ${formatPlural(node.count, "tensor")}`));
    area.replaceChildren(...layOut(node, 0, 0, area.clientWidth, area.clientHeight, true).map((part) => makeBox(part, shown, true)));
    if (focused) focus(focused.at(-1));
  }

  // Boxes inside a box open by a click; the keyboard opens one level after another.
  function makeBox({ node, ...box }, above, isTop = false) {
    const path = [...above, node], width = box.width - 2, height = box.height - 2;
    const inside = node.children.size ? layOut(node, 2, NAME_HEIGHT, width - 6, height - NAME_HEIGHT - 4) : [];
    const isWide = width > Math.max(node.name.length, 6) * LETTER + 76;
    const element = make(isTop ? "button" : "i", { class: `box${node.tensor && node.tensor === selected ? " chosen" : ""}`, "aria-label": isTop ? describe(node) : null,
      style: `left:${box.x}px;top:${box.y}px;width:${width}px;height:${height}px;--part:${colorOfNode(node)};background:${colorOfNode(node)}${isTop ? "3d" : "29"}` },
      hasRoom(node, box) ? make("span", { class: "label" }, makeName(node.name, Math.floor(width / LETTER / 2)), isWide ? make("small", {}, formatSize(node.nbytes)) : "") : "",
      inside.map((part) => makeBox(part, path)));
    paths.set(element, path);
    return element;
  }

  new ResizeObserver(draw).observe(area);
  views.push(draw);
  return {
    element: make("section", { "aria-labelledby": "sizes" }, make("h2", { id: "sizes" }, "Sizes by name"), crumbs, area,
      make("p", { class: "soft" }, "A box is a part of a name, in the color of its part of the checkpoint, or gray with several. Click it or press Enter to open it, Escape to go back. “0 – 49” are neighbors from the first to the last. A tied tensor counts once.")),
    show(rows) { shown = [growTree(rows)]; draw(); panel.show(describeNode(shown[0])); },
  };
}

function describeNode(node) {
  const all = listTensors(node), stored = all.filter((tensor) => !tensor.tiedTo);
  const sizes = new Map();
  for (const tensor of stored) sizes.set(tensor.dtype, (sizes.get(tensor.dtype) ?? 0) + tensor.nbytes);
  const largest = stored.sort((a, b) => b.nbytes - a.nbytes).slice(0, 12);
  return [
    make("h3", { class: "mono" }, node.full || "All tensors"),
    makeList([["size", `${formatSize(node.nbytes)} (${formatCount(node.nbytes)} bytes)`], ["tensors", formatCount(all.length)], ["parts", [...node.parts].join(", ")],
      ...[...sizes].map(([dtype, nbytes]) => [dtype, formatSize(nbytes)])]),
    make("h3", {}, "Largest tensors"), make("ul", { class: "rows" }, largest.map((tensor) => make("li", {}, linkTensor(tensor, makeName(tensor.name)), formatSize(tensor.nbytes)))),
  ];
}

// ---- bytes by file -------------------------------------------------------------------------------------------------

const COLORINGS = {
  part: { list: () => parts, of: (piece) => parts.indexOf(piece.tensor.part) },
  dtype: { list: () => data.dtypes, of: (piece) => data.dtypes.indexOf(piece.tensor.dtype) },
  tensor: { list: () => [], of: (piece) => piece.tensor.index % 97 },
};

function makeMap() {
  const ROW = 24, widest = Math.max(...files.map((file) => file.extent), 1);
  const canvas = make("canvas", { tabindex: 0, role: "application", "aria-label": "Bytes by file", "aria-describedby": "map-help" });
  const spacer = make("div", { style: `height:${files.length * ROW}px; margin-bottom: 0` });
  const scroll = make("div", { class: "scroll map", scroll: () => draw() });
  const legend = make("span", { class: "legend" });
  let view = { from: 0, to: widest }, coloring = COLORINGS.part, at = null;
  scroll.append(canvas, spacer);

  const height = () => Math.min(files.length * ROW, 468);
  const edge = () => Math.min(250, Math.round(canvas.clientWidth * 0.35)); // of the names
  const scale = () => (canvas.clientWidth - edge()) / (view.to - view.from);
  const firstFrom = (file, byte) => {
    let low = 0, high = file.ends.length;
    while (low < high) { const middle = (low + high) >> 1; if (file.ends[middle] > byte) high = middle; else low = middle + 1; }
    return low;
  };

  function draw() {
    const ratio = devicePixelRatio || 1, width = scroll.clientWidth;
    const pen = canvas.getContext("2d");
    const resolve = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
    spacer.style.marginTop = `${-height()}px`;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height()}px`;
    [canvas.width, canvas.height] = [width * ratio, height() * ratio];
    pen.scale(ratio, ratio);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    const colors = { text: resolve("--text"), empty: resolve("--empty"), bad: resolve("--bad"), accent: resolve("--accent") };
    const first = Math.floor(scroll.scrollTop / ROW);
    for (let row = first; row < Math.min(first + Math.ceil(height() / ROW) + 1, files.length); row += 1) {
      drawFile(pen, files[row], row * ROW - scroll.scrollTop, width, colors);
    }
  }

  function drawFile(pen, file, y, width, colors) {
    const left = edge(), each = scale(); // read once: they ask for the layout
    pen.fillStyle = file.nbytes < 0 ? colors.bad : colors.text;
    pen.fillText(shorten(pen, `${formatFile(file)}${file.nbytes < 0 ? " (missing)" : ""}`, left - 20), 8, y + ROW / 2);
    pen.save();
    pen.beginPath();
    pen.rect(left, y, width - left, ROW);
    pen.clip();
    const toX = (byte) => left + (byte - view.from) * each;
    pen.fillStyle = colors.empty;
    pen.fillRect(toX(0), y + 3, Math.max(file.extent, 0) * each, ROW - 6);
    let lastX = -1, lastColor = -1;
    for (let index = firstFrom(file, view.from); index < file.pieces.length && file.pieces[index].offset < view.to; index += 1) {
      const piece = file.pieces[index], x = toX(piece.offset), end = Math.max(toX(piece.end), x + 0.5), color = coloring.of(piece);
      if (end <= lastX + 1 && color === lastColor) continue;
      pen.fillStyle = pickColor(color);
      pen.fillRect(x, y + 3, end - x - (end - x > 4 ? 1 : 0), ROW - 6);
      if (piece.tensor.faults.length) { pen.fillStyle = colors.bad; pen.fillRect(x, y + ROW - 6, end - x, 3); }
      if (end > lastX + 1) [lastX, lastColor] = [Math.floor(end), color];
    }
    for (const piece of selected?.pieces ?? []) if (piece.file === file) mark(pen, toX, piece, y, colors.accent, 2);
    if (at?.file === file) mark(pen, toX, at, y, colors.text, 3);
    pen.restore();
  }

  function mark(pen, toX, piece, y, color, width) {
    pen.strokeStyle = color;
    pen.lineWidth = width;
    pen.strokeRect(toX(piece.offset), y + 2, Math.max(toX(piece.end) - toX(piece.offset), 2), ROW - 4);
  }

  function shorten(pen, text, width) {
    if (pen.measureText(text).width <= width) return text;
    let keep = Math.min(text.length - 9, 60);
    while (keep > 8 && pen.measureText(`${text.slice(0, 9)}…${text.slice(-keep)}`).width > width) keep -= 2;
    return `${text.slice(0, 9)}…${text.slice(-keep)}`;
  }

  function find(event) {
    const box = canvas.getBoundingClientRect();
    const file = files[Math.floor((event.clientY - box.top + scroll.scrollTop) / ROW)];
    const byte = view.from + (event.clientX - box.left - edge()) / scale();
    if (!file || event.clientX - box.left < edge()) return { file };
    const near = 2 / scale();
    for (let index = firstFrom(file, byte - near); index < file.pieces.length && file.pieces[index].offset <= byte + near; index += 1) {
      if (file.pieces[index].end >= byte - near) return { file, byte, piece: file.pieces[index] };
    }
    return { file, byte };
  }

  const describe = (piece) => `${piece.tensor.name} ${formatBox(piece)} of ${formatShape(piece.tensor.shape)} ${piece.tensor.dtype}\n${formatFile(piece.file)}, ${formatBytes(piece)} (${formatSize(piece.nbytes)})`;

  function zoom(factor, around = (view.from + view.to) / 2) {
    const width = Math.min(Math.max((view.to - view.from) * factor, 16), widest);
    const share = (around - view.from) / (view.to - view.from);
    pan(around - share * width, width);
  }

  function pan(from, width = view.to - view.from) {
    from = Math.max(Math.min(from, widest - width), 0);
    view = { from, to: from + width };
    draw();
  }

  function go(piece) {
    if (!piece) return;
    at = piece;
    const row = piece.file.index * ROW;
    if (row < scroll.scrollTop || row + ROW > scroll.scrollTop + height()) scroll.scrollTop = row;
    if (piece.end < view.from || piece.offset > view.to) pan(piece.offset - (view.to - view.from) / 2);
    draw();
    announce(describe(piece));
  }

  function step(key) {
    const file = at?.file ?? files.find((each) => each.pieces.length);
    if (!file) return;
    const index = at ? file.pieces.indexOf(at) : -1;
    if (!at) go(file.pieces[0]);
    else if (key === "ArrowRight" || key === "ArrowLeft") go(file.pieces[index + (key === "ArrowRight" ? 1 : -1)]);
    else {
      const sign = key === "ArrowDown" ? 1 : -1;
      let next = file.index + sign;
      while (files[next] && !files[next].pieces.length) next += sign;
      if (files[next]) go(files[next].pieces[Math.min(firstFrom(files[next], at.offset), files[next].pieces.length - 1)]);
    }
  }

  canvas.addEventListener("keydown", (event) => {
    const actions = { "+": () => zoom(0.5, at?.offset), "=": () => zoom(0.5, at?.offset), "-": () => zoom(2, at?.offset), 0: () => zoom(Infinity), Enter: () => at && select(at.tensor) };
    const action = event.key.startsWith("Arrow") ? () => step(event.key) : actions[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, find(event).byte);
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: view.from, isMoved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 3) drag.isMoved = true;
    if (drag?.isMoved) return pan(drag.from - (event.clientX - drag.x) / scale());
    const { piece, file, byte } = find(event);
    const text = piece ? describe(piece) : file && byte !== undefined ? `${formatFile(file)}\nno tensor here` : file ? `${formatFile(file)}\n${formatSize(file.nbytes)}, ${formatPlural(file.pieces.length, "piece")}` : "";
    showTip(text, event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerup", (event) => {
    const { piece } = find(event);
    if (!drag?.isMoved && piece) { at = piece; select(piece.tensor); }
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => showTip(""));

  const drawLegend = () => legend.replaceChildren(...coloring.list().map((name, index) => make("span", {}, make("i", { style: `background:${pickColor(index)}` }), name)));
  const choose = make("select", { "aria-label": "Color by", change: () => { coloring = COLORINGS[choose.value]; drawLegend(); draw(); } },
    Object.keys(COLORINGS).map((name) => make("option", { value: name }, `color by ${name}`)));
  const probe = make("span", { class: "hidden" });
  drawLegend();
  addEventListener("theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(draw).observe(scroll);
  views.push(draw);
  const left = data.pieces.total - pieces.length;
  return make("section", { "aria-labelledby": "map" }, make("h2", { id: "map" }, "Bytes by file"),
    make("div", { class: "bar" }, make("button", { click: () => zoom(0.5), "aria-label": "Zoom in" }, "+"), make("button", { click: () => zoom(2), "aria-label": "Zoom out" }, "−"),
      make("button", { click: () => zoom(Infinity) }, "Full width"), choose, legend),
    scroll, probe, left ? make("p", { class: "bad" }, `${formatCount(left)} of ${formatPlural(data.pieces.total, "piece")} are not drawn: each tensor has its first ones here.`) : "",
    make("p", { class: "soft", id: "map-help" }, "A row is a file, a box is a piece of a tensor at its bytes. Drag to move, Ctrl and the wheel to zoom. With the keyboard: arrows go from piece to piece and from file to file, + and - zoom, 0 shows the full width, Enter opens the tensor."));
}

// ---- tensors -------------------------------------------------------------------------------------------------------

function makeTensors() {
  const grid = new Grid("Tensors", [
    { name: "tensor", width: "minmax(150px, 1fr)", value: (t) => t.index, text: (t) => t.name, mark: (t) => (t.faults.length ? make("b", { class: "bad" }, "✕ ") : "") },
    { name: "dtype", width: "90px", value: (t) => t.dtype, text: (t) => t.dtype },
    { name: "shape", width: "120px", value: (t) => t.shape.reduce((a, b) => a * b, 1), text: (t) => formatShape(t.shape) },
    { name: "size", width: "80px", isNumber: true, value: (t) => t.nbytes, text: (t) => formatSize(t.nbytes) },
    { name: "pieces", width: "60px", isNumber: true, value: (t) => t.count, text: (t) => formatCount(t.count) },
  ], { onSelect: select });
  const shown = make("span", { class: "soft", role: "status" });
  const pattern = make("input", { type: "search", placeholder: "name, or a glob such as *.weight", "aria-label": "Filter by name", size: 34, input: () => filter() });
  const part = make("select", { "aria-label": "Part", change: () => filter() }, make("option", { value: "" }, "all parts"), parts.map((name) => make("option", { value: name }, name)));
  const isDamaged = make("input", { type: "checkbox", change: () => filter() });
  const hasFaults = tensors.some((tensor) => tensor.faults.length);

  function filter() {
    const matches = makeMatcher(pattern.value.trim());
    const rows = tensors.filter((t) => matches(t.name) && (!part.value || t.part === part.value) && (!isDamaged.checked || t.faults.length));
    grid.show(rows);
    tree.show(rows);
    shown.textContent = `${formatPlural(rows.length, "tensor")}, ${formatSize(rows.reduce((sum, t) => sum + (t.tiedTo ? 0 : t.nbytes), 0))}`;
  }

  views.push((tensor) => { if (tensor) { grid.reveal(tensor); panel.reveal(describeTensor(tensor)); announce(`${tensor.name} selected`); } });
  filter();
  return {
    bar: make("div", { class: "bar" }, pattern, part, hasFaults ? make("label", {}, isDamaged, " damaged only") : "", shown),
    element: make("section", { "aria-labelledby": "tensors" }, make("h2", { id: "tensors" }, "Tensors"), grid.element),
  };
}

function describeTensor(tensor) {
  const facts = [["dtype", tensor.dtype], ["shape", formatShape(tensor.shape)], ["size", `${formatSize(tensor.nbytes)} (${formatCount(tensor.nbytes)} bytes)`], ["part", tensor.part], ["pieces", formatCount(tensor.count)]];
  if (tensor.tiedTo) facts.push(["tied to", linkTensor(tensor.tiedTo)]);
  const slots = findSlots(tensor);
  return [
    make("h3", { class: "mono" }, tensor.name), makeList(facts),
    ...tensor.faults.map((fault) => make("p", { class: "bad mono" }, fault.text)),
    tensor.pieces.length ? drawBoxes(tensor) : "",
    slots.length ? make("h3", {}, "Optimizer state") : "", slots.length ? makeTable(["slot", "dtype", "shape"], slots.map(([slot, each]) => [linkTensor(each, slot), each.dtype, formatShape(each.shape)])) : "",
    tensor.pieces.length ? make("h3", {}, "Pieces") : "", tensor.pieces.length ? makeTable(["box", "file", "bytes"], tensor.pieces.slice(0, 256).map((piece) => [formatBox(piece), formatFile(piece.file), `${formatCount(piece.offset)} + ${formatCount(piece.nbytes)}${piece.isExact ? "" : " *"}`])) : "",
    pieces.length && tensor.count > Math.min(tensor.pieces.length, 256) ? make("p", { class: "soft" }, `${formatCount(tensor.count - Math.min(tensor.pieces.length, 256))} more`) : "",
    tensor.pieces.some((piece) => !piece.isExact) ? make("p", { class: "soft" }, "* these bytes also hold other elements, or are compressed") : "",
  ];
}

const linkTensor = (tensor, text = tensor.name) => make("button", { click: () => select(tensor) }, text);

// `<optimizer>.state.<parameter>.<slot>`, or without `state`; parameters are named below the model's path.
const slots = new Map();
for (const tensor of tensors.filter((each) => each.part === "optimizer")) {
  const prefix = data.parts.optimizer.filter((place) => isUnder(tensor.name, place)).sort((a, b) => b.length - a.length)[0] ?? "";
  const keys = (prefix ? tensor.name.slice(prefix.length + 1) : tensor.name).split(".");
  const param = keys.slice(keys[0] === "state" ? 1 : 0, -1).join(".");
  if (!slots.has(param)) slots.set(param, []);
  slots.get(param).push([keys.at(-1), tensor]);
}
function findSlots(tensor) {
  const prefix = (data.parts.model ?? []).find((place) => isUnder(tensor.name, place)) ?? "";
  return tensor.part === "model" ? slots.get(prefix ? tensor.name.slice(prefix.length + 1) : tensor.name) ?? [] : [];
}

function drawBoxes(tensor) {
  const split = tensor.shape.map((_, d) => d).filter((d) => tensor.pieces.some((piece) => piece.size[d] < tensor.shape[d]));
  const [rows, columns] = [...new Set([...split, ...tensor.shape.keys()])].slice(0, 2).sort((a, b) => a - b);
  const extent = (d) => Math.max(tensor.shape[d] ?? 1, 1);
  const label = tensor.pieces.slice(0, 8).map((piece) => `${formatBox(piece)} in ${formatFile(piece.file)}`).join("; ");
  const svg = makeSvg("svg", { viewBox: "0 0 400 190", preserveAspectRatio: "none", role: "img", "aria-label": `Boxes of ${tensor.name}: ${label}${tensor.count > 8 ? "; and more" : ""}` });
  for (const piece of tensor.pieces.slice(0, 1024)) {
    const of = (d, length) => (d === undefined ? [0, length] : [((piece.start[d] ?? 0) / extent(d)) * length, ((piece.size[d] ?? 1) / extent(d)) * length]);
    const [y, height] = of(rows, 190), [x, width] = of(columns, 400);
    const rect = makeSvg("rect", { x, y, width, height, fill: pickColor(piece.file.index), stroke: "#fff", "stroke-width": 0.7, "vector-effect": "non-scaling-stroke" });
    rect.addEventListener("mousemove", (event) => showTip(`${formatBox(piece)}\n${formatFile(piece.file)}, ${formatBytes(piece)}`, event.clientX, event.clientY));
    rect.addEventListener("mouseleave", () => showTip(""));
    svg.append(rect);
  }
  const caption = tensor.shape.length > 2 ? `dimensions ${rows} (down) and ${columns} (across) of ${tensor.shape.length}` : tensor.shape.length === 2 ? "rows down, columns across" : "";
  return make("figure", { style: "margin: 6px 0" }, svg, make("figcaption", { class: "soft" }, caption));
}

// ---- other values --------------------------------------------------------------------------------------------------

function makeValues() {
  const isSetting = ([name]) => /(^|\.)param_groups\./.test(name);
  const lists = [
    ["Param groups", data.objects.filter(isSetting)],
    ["Other values", data.objects.filter((row) => !isSetting(row))],
    ["Text in the headers", data.metadata],
    ["Tied tensors", data.ties.map(([tied, kept]) => [tensors[tied].name, tensors[kept].name])],
  ].filter(([, rows]) => rows.length);
  if (!lists.length) return "";
  return make("section", { "aria-labelledby": "values" }, make("h2", { id: "values" }, "Values"),
    lists.map(([title, rows]) => {
      const box = make("details", { toggle: () => { if (box.open && box.children.length === 1) box.append(makeTable(["name", "value"], rows.slice(0, 2000)), rows.length > 2000 ? `${formatCount(rows.length - 2000)} more` : ""); } },
        make("summary", {}, `${title} (${formatCount(rows.length)})`));
      return box;
    }), data.objects_left_out ? make("p", { class: "soft" }, `${formatPlural(data.objects_left_out, "value")} more in the checkpoint`) : "");
}

const ranks = new Set(files.map((file) => file.rank).filter((rank) => rank !== null));
const problems = [...new Set([...data.warnings, ...data.faults.map((fault) => fault.text)])];
const panel = makePanel("Chosen tensor or part of a name"), tree = makeTree(), list = makeTensors();
addThemeButton();
document.getElementById("main").replaceChildren(
  make("p", { class: "soft" }, `${data.format} checkpoint`),
  makeFacts([[formatCount(tensors.length), tensors.length === 1 ? "tensor" : "tensors"], [formatSize(data.nbytes), `${formatCount(data.nbytes)} bytes`], [formatCount(files.length), files.length === 1 ? "file" : "files"],
    ...(ranks.size ? [[formatCount(ranks.size), ranks.size === 1 ? "rank in file names" : "ranks in file names"]] : []),
    ...data.dtypes.map((dtype) => [formatCount(tensors.filter((t) => t.dtype === dtype).length), dtype])]),
  problems.length ? makeProblems(formatPlural(problems.length, "problem"), problems) : "",
  list.bar, make("div", { class: "split" }, tree.element, panel.element, pieces.length ? makeMap() : "", list.element), makeValues());

const opened = location.hash && tensors.find((tensor) => tensor.name === decodeURIComponent(location.hash.slice(1)));
if (opened) select(opened);
document.documentElement.dataset.ready = "true";
