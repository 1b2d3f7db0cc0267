// Part 1, the answer: state of the run, the verdict, and the policy against every baseline.

const hostOf = (id) => document.querySelector(`#${id} > .host`);

// Draw a part for each run, next to each other where there are several; `draw(run)` returns nodes or null.
function perRun(id, names, draw, { before, empty } = {}) {
  view([...names, "answer"], () => {
    const host = hostOf(id);
    const several = knownRuns().length > 1;
    const articles = knownRuns().map((run) => {
      const label = runLabel(run);
      return el("article", { class: "run", "data-run": run.index, "aria-label": several ? label : null },
        several && el("h3", { class: "run-name" }, el("span", { class: "swatch", style: { "--color": runColor(run) } }), `${runLetter(run)} · ${label}`),
        draw(run) ?? el("p", { class: "note" }, empty ?? "Nothing recorded yet."));
    });
    const shared = before?.() ?? null;
    replace(host, shared, el("div", { class: several ? "side" : "single" }, articles));
  });
}

const STATES = { running: "running", finished: "finished", interrupted: "interrupted", killed: "stopped without a word" };

function stateLine(data) {
  const steps = isNumber(data.step) && `${fixed(data.step, 0)}${data.steps ? ` of ${fixed(data.steps, 0)}` : ""} steps`;
  const started = data.started && String(data.started).replace("T", " ").replace(/([+-]\d\d):?\d\d$|Z$/, "").slice(0, 16);
  const share = data.steps ? Math.min(1, data.step / data.steps) : 0;
  return el("div", { class: "state" },
    data.state && el("span", { class: `pill ${data.state}` }, STATES[data.state] ?? data.state),
    el("span", null, [steps, started && `started ${started}`, data.written && `written ${data.written}`, data.folder].filter(Boolean).join(" · ")),
    data.state === "running" && el("progress", { max: "1", value: share, "aria-label": "Steps done" }));
}

function answerRow(row, best) {
  const bar = el("span", { class: "method", style: { "--color": methodColor(row.method) } }, row.method);
  const note = row.note ?? METHOD_NOTES[row.method];
  const missing = Object.values(row.unscored ?? {});
  const unscored = isNumber(row.unscored) ? row.unscored : missing.reduce((sum, count) => sum + count, 0);
  return [
    { text: [bar, note ? el("small", null, note) : null], value: row.method },
    { text: rateCell(row.success, row.success_ci, methodColor(row.method)), value: row.success, class: row.success === best ? "best" : null },
    { text: rate(row.false_refusal, row.false_refusal_ci), value: row.false_refusal },
    { text: rate(row.guard_refusal, row.guard_refusal_ci), value: row.guard_refusal },
    { text: fixed(row.calls, 1), value: row.calls }, { text: fixed(row.tokens, 0), value: row.tokens },
    { text: seconds(row.seconds), value: row.seconds }, { text: fixed(unscored, 0), value: unscored },
  ];
}

const withMinus = (text) => text.replace(/(?<=[ ([])-(?=\d)/g, MINUS);
const withInterval = (text, ci, show) => el("span", { class: "value" }, text, " ", el("small", null, interval(ci, show)));
const rate = (share, ci) => withInterval(percent(share), ci, percent);

// A rate with a picture of its interval on the axis 0 to 100 %.
function rateCell(share, ci, color) {
  if (!isNumber(share)) return "–";
  const place = (value) => `${(100 * value).toFixed(2)}%`;
  return el("span", { class: "rate" },
    el("span", { class: "track", "aria-hidden": "true", style: { "--color": color } },
      ci && el("span", { class: "range", style: { left: place(ci[0]), width: place(ci[1] - ci[0]) } }),
      el("span", { class: "point", style: { left: place(share) } })),
    rate(share, ci));
}

function drawAnswer(run) {
  const data = section(run, "answer");
  if (!data) return null;
  const best = Math.max(...(data.methods ?? []).map((row) => row.success ?? -1));
  return [
    stateLine(data),
    data.verdict && el("p", { class: "verdict" }, withMinus(data.verdict)),
    (data.warnings ?? []).map((text) => el("p", { class: "warning" }, text)),
    data.methods?.length
      ? [el("p", { class: "note" }, `${plural(data.n ?? 0, data.questions ?? "held-out question")}. Percent with 95 % intervals; calls, tokens and seconds are totals for a question.`),
        table({
          caption: "The policy and the baselines", kind: "cards answer", rows: data.methods.map((row) => answerRow(row, best)),
          header: ["method", "success", "false refusals", "guard refusals", "calls", "tokens", "seconds", "unscored"],
        }),
        data.plan && el("p", { class: "note" }, `best_plan: ${data.plan}`)]
      : el("p", { class: "note" }, data.state === "finished"
        ? "No comparison with the baselines: the run had --no-evaluate, or no held-out questions."
        : "No comparison with the baselines yet: it is made when training ends."),
  ];
}

// Two or more runs: each method of one against the same method of the other, question by question.
function pairsTable() {
  const rows = store.pairs?.rows ?? [];
  const titles = [...new Set(rows.map((row) => `${row.b} against ${row.a}`))];
  return titles.map((title) => el("div", { class: "pairs" }, el("h3", null, title),
    el("p", { class: "note" }, "The same questions in both runs. Gained: right in the first named run only."),
    table({
      caption: title, kind: "cards", header: ["method", "gained", "lost", "same right", "same wrong", "difference, points", "p"],
      rows: rows.filter((row) => `${row.b} against ${row.a}` === title).map((row) => [
        { text: el("span", { class: "method", style: { "--color": methodColor(row.method) } }, row.method), value: row.method }, ...outcomeCells(row)]),
    })));
}

const outcomeCells = (row) => [
  { text: fixed(row.gained, 0), value: row.gained }, { text: fixed(row.lost, 0), value: row.lost },
  { text: fixed(row.same_right, 0), value: row.same_right }, { text: fixed(row.same_wrong, 0), value: row.same_wrong },
  { text: withInterval(points(row.difference), row.ci, points), value: row.difference, class: leadClass(row.ci) },
  { text: probability(row.p), value: row.p },
];

const leadClass = (ci) => (!ci || (ci[0] <= 0 && ci[1] >= 0) ? null : ci[0] > 0 ? "better" : "worse");

view(["answer"], () => {
  const names = knownRuns().map(runLabel);
  document.getElementById("title").textContent = names.join(" and ") || "Query Mutator";
  document.title = `${names.join(" and ")} · Query Mutator`;
});
perRun("answer", ["answer"], drawAnswer, { before: pairsTable });
