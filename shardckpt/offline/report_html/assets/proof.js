// The page of a run's resumes: its steps on a line, a mark for each verdict, and the resumes as a table.

const data = await readData();

const MARKS = { proven: "✓", diverged: "✕", unproven: "?", "no record": "·" };
const TEXTS = {
  proven: "the last resume that was compared is the run that was",
  diverged: "the last resume that was compared trains something else",
  unproven: "recorded, but no resume was compared to the end",
  "no record": "no training step behind it was recorded",
};
const HEIGHT = 120, LEFT = 30, RIGHT = 30, LINE = 52;
const NAME_WIDTH = 110, MIN_GAP = 18; // pixels for a number below the line, and between steps that have marks

const { steps } = data;
const countOf = (verdict) => steps.filter((step) => step.verdict === verdict).length;
const formatTime = (seconds) => `${new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ")}Z`;
const formatRanks = (ranks, style) => `${formatPlural(ranks, "rank")}${style ? `, ${style}` : ""}`;

function formatTopology(resume) {
  const before = formatRanks(resume.rank_count_before, resume.style_before);
  const now = formatRanks(resume.rank_count, resume.style || resume.style_before);
  return before === now ? now : `${before} → ${now}`;
}

const nameOf = (step) => `step ${formatCount(step.number)}${step.tier ? ` (capture, ${step.tier})` : ""}`;

function describeStep(step) {
  const resumes = step.resumes.length ? `, ${formatPlural(step.resumes.length, "resume")}` : "";
  return `${nameOf(step)}: ${step.verdict}${resumes}`;
}

// Steps in order, then captures that the run was resumed from, at equal distances: numbers of steps may jump, and begin anew on a branch.
const width = () => Math.max(line.clientWidth, 240);
const toX = (at) => (steps.length < 2 ? width() / 2 : LEFT + (at / (steps.length - 1)) * (width() - LEFT - RIGHT));
let cursor = Math.max(steps.findIndex((step) => step.verdict === "diverged"), 0);
const line = makeSvg("svg", { class: "chart proof", height: HEIGHT, role: "application", tabindex: 0,
  "aria-label": `${formatPlural(steps.length, "step")} of the run in order`, "aria-describedby": "line-help" });
const shown = make("p", { role: "status", class: "mono" });

function drawLine() {
  const every = Math.ceil(steps.length / Math.max(Math.floor(width() / NAME_WIDTH), 1));
  const gap = steps.length < 2 ? width() : toX(1) - toX(0);
  const parts = [makeSvg("line", { class: "axis", x1: LEFT, x2: width() - RIGHT, y1: LINE, y2: LINE })];
  steps.forEach((step, at) => {
    const x = toX(at), radius = Math.max(Math.min(gap / 2 - 1, 13), 2);
    const title = makeSvg("title", {}, describeStep(step));
    parts.push(makeSvg("circle", { class: `step ${step.verdict.replace(" ", "-")}`, cx: x, cy: LINE, r: radius }, title));
    if (gap >= MIN_GAP) parts.push(makeSvg("text", { class: "mark", x, y: LINE + 5, "text-anchor": "middle" }, MARKS[step.verdict]));
    if (at % every === 0) parts.push(makeSvg("text", { x, y: LINE + 42, "text-anchor": "middle" }, formatCount(step.number)));
  });
  parts.push(makeSvg("path", { class: "pointer", d: "" }));
  line.replaceChildren(...parts);
  moveTo(cursor);
}

function moveTo(at) {
  cursor = Math.max(Math.min(at, steps.length - 1), 0);
  const x = toX(cursor);
  line.querySelector(".pointer").setAttribute("d", steps.length ? `M${x - 6} ${LINE - 30}h12l-6 9z` : "");
  shown.textContent = steps.length ? describeStep(steps[cursor]) : "no complete step";
}

line.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: cursor - 1, ArrowRight: cursor + 1, Home: 0, End: steps.length - 1 };
  if (!(event.key in moves)) return;
  moveTo(moves[event.key]);
  announce(shown.textContent);
  event.preventDefault();
});

line.addEventListener("pointermove", (event) => {
  if (!steps.length) return;
  const x = event.clientX - line.getBoundingClientRect().left;
  moveTo(Math.round(steps.length < 2 ? 0 : ((x - LEFT) / (width() - LEFT - RIGHT)) * (steps.length - 1)));
});

function makeLegend() {
  return make("div", { class: "legend" }, Object.keys(MARKS).map((verdict) => make("span", {},
    make("i", { class: `verdict ${verdict.replace(" ", "-")}`, "aria-hidden": "true" }), `${verdict}: ${TEXTS[verdict]}`)));
}

// Resumes, the newest first; those that diverged are listed above with their sentences.
const resumes = steps.flatMap((step) => step.resumes.map((resume) => ({ ...resume, of: step.number, from: step.tier, name_of_step: nameOf(step) })))
  .sort((a, b) => b.began_at - a.began_at);

function makeFindings() {
  const diverged = resumes.filter((resume) => resume.verdict === "diverged");
  if (!diverged.length) return [];
  return [make("section", { "aria-labelledby": "found" }, make("h2", { id: "found" }, "What differed first"),
    diverged.slice(0, 50).map((resume) => make("article", { class: "finding" },
      make("h3", {}, `${resume.cause}: `, make("span", { class: "mono" }, resume.name)),
      make("p", {}, `${resume.sentence}.`), make("p", { class: "soft" }, `${resume.fix}.`),
      make("p", { class: "soft" }, `Resumed from ${resume.name_of_step} at ${formatTime(resume.began_at)} on ${formatTopology(resume)}.`))))];
}

const table = new Grid("Resumes", [
  { name: "step", width: "90px", isNumber: true, value: (row) => row.of, text: (row) => formatCount(row.of) },
  { name: "tier", width: "90px", value: (row) => row.from, text: (row) => row.from },
  { name: "verdict", width: "110px", value: (row) => row.verdict, text: (row) => `${MARKS[row.verdict]} ${row.verdict}` },
  { name: "resumed", width: "180px", value: (row) => row.began_at, text: (row) => formatTime(row.began_at) },
  { name: "equal steps", width: "160px", value: (row) => row.compared, text: (row) => `${row.compared} of ${row.steps}${row.is_exact ? ", bit for bit" : ""}` },
  { name: "ranks", width: "minmax(160px, 1fr)", value: (row) => row.rank_count, text: formatTopology },
  { name: "first difference", width: "minmax(160px, 2fr)", value: (row) => row.name, text: (row) => row.sentence },
]);

addThemeButton();
document.getElementById("main").replaceChildren(...[
  make("p", { class: "mono" }, data.root),
  makeFacts([[formatCount(steps.length), steps.length === 1 ? "step" : "steps"],
    ...Object.keys(MARKS).map((verdict) => [formatCount(countOf(verdict)), verdict])]),
  data.warnings.length ? makeProblems("Files that cannot be read", data.warnings) : null,
  make("section", { "aria-labelledby": "line" }, make("h2", { id: "line" }, "Steps of the run"), line, shown,
    makeLegend(), make("p", { class: "soft", id: "line-help" }, "Left and right move by step.")),
  ...makeFindings(),
  make("section", { "aria-labelledby": "resumes" }, make("h2", { id: "resumes" }, "Resumes"),
    resumes.length ? table.element : make("p", { class: "soft" }, "No resume was compared with a record."))].filter(Boolean));
drawLine();
new ResizeObserver(drawLine).observe(line);
table.element.style.height = `${Math.min(resumes.length + 1, 14) * Grid.ROW + 6}px`;
table.show(resumes);
document.documentElement.dataset.ready = "true";
