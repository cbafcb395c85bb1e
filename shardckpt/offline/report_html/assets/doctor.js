// The page of a run's health: one line for each check, problems first, with what to type next.

const data = await readData();

const MARKS = { problem: "✕", ok: "✓", info: "·" };
const COLORS = { problem: "var(--bad)", ok: "var(--good)", info: "var(--soft)" };
const ORDER = Object.keys(MARKS);

const countOf = (status) => data.checks.filter((check) => check.status === status).length;
const checks = [...data.checks].sort((a, b) => ORDER.indexOf(a.status) - ORDER.indexOf(b.status));

function makeCheck(check) {
  const mark = make("b", { style: `color: ${COLORS[check.status]}` }, `${MARKS[check.status]} ${check.status}`);
  const next = check.next ? [make("p", {}, "Next: ", make("code", { class: "mono" }, check.next))] : [];
  return make("article", { class: "finding" }, make("h3", {}, `${check.name} `, mark), make("p", {}, check.text), ...next);
}

addThemeButton();
const problems = countOf("problem");
document.getElementById("main").replaceChildren(
  make("p", { class: "mono" }, data.root),
  make("p", { role: "status", style: `color: ${COLORS[problems ? "problem" : "ok"]}` },
    problems ? `${formatPlural(problems, "problem")} found.` : "No problem found."),
  makeFacts([[data.newest === null ? "none" : formatCount(data.newest), "newest step"],
    ...ORDER.map((status) => [formatCount(countOf(status)), status])]),
  make("section", { "aria-label": "Checks" }, checks.map(makeCheck)));
document.documentElement.dataset.ready = "true";
