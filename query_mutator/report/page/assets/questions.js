// The rows of part 6: held-out questions with the outcome of every method, and the episodes of training.

const OUTCOMES = { right: "right", wrong: "wrong", refused: "refused", unscored: "unscored", kept: "refused, as it should", leaked: "answered, should be refused", missing: "not asked" };
const ICONS = { right: "M3.5 8.5l3 3 6-7", wrong: "M4.5 4.5l7 7m0-7l-7 7", refused: "M3.5 8h9", unscored: "M8 4v5m0 2.6v.4", kept: "M3.5 8.5l3 3 6-7", leaked: "M4.5 4.5l7 7m0-7l-7 7", missing: "" };

function outcomeOf(question, result) {
  if (!result) return "missing";
  if (question.set === "guard") return result.error ? "unscored" : result.refused ? "kept" : "leaked";
  if (result.error || result.success === null || result.success === undefined) return "unscored";
  if (result.success >= 0.5) return "right";
  return result.refused ? "refused" : "wrong";
}

const good = (outcome) => ["right", "kept"].includes(outcome);

function outcomeIcon(outcome) {
  return el("span", { class: `outcome ${outcome}`, title: OUTCOMES[outcome] },
    svg("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[outcome] })),
    el("span", { class: "hidden" }, OUTCOMES[outcome]));
}

// A side of a comparison is a method of a run, written "run:method".
const sideKey = (run, method) => `${run.index}:${method}`;
const sideOf = (key) => { const [index, ...rest] = key.split(":"); return { run: runs[Number(index)], method: rest.join(":") }; };
const sideName = (key) => (knownRuns().length > 1 ? `${sideOf(key).method} ${runLetter(sideOf(key).run)}` : sideOf(key).method);

function allSides() {
  return knownRuns().flatMap((run) => {
    const names = new Set(run.questions.flatMap((question) => Object.keys(question.methods)));
    const ordered = [...METHODS.filter((name) => names.has(name)), ...[...names].filter((name) => !METHODS.includes(name))];
    return ordered.map((method) => sideKey(run, method));
  });
}

// One row for each question of all runs, paired by set and id.
function questionRows() {
  const byKey = new Map();
  for (const run of knownRuns()) {
    for (const question of run.questions) {
      const key = `${question.set}/${question.id}`;
      const row = byKey.get(key) ?? { key, id: question.id, set: question.set, tags: question.tags ?? [], inRuns: new Map() };
      row.inRuns.set(run.index, { run, question });
      byKey.set(key, row);
    }
  }
  return [...byKey.values()];
}

const firstOf = (row) => row.inRuns.values().next().value;
const resultOf = (row, side) => row.inRuns.get(Number(side.split(":")[0]))?.question.methods[sideOf(side).method];
const outcomeIn = (row, side) => {
  const place = row.inRuns.get(Number(side.split(":")[0]));
  return place ? outcomeOf(place.question, place.question.methods[sideOf(side).method]) : "missing";
};

function changeOf(row, sides) {
  const [from, to] = [outcomeIn(row, sides.from), outcomeIn(row, sides.to)];
  if ([from, to].some((outcome) => outcome === "missing" || outcome === "unscored")) return "unscored";
  if (good(from) === good(to)) return good(to) ? "same right" : "same wrong";
  return good(to) ? "gained" : "lost";
}

// Numbers of all texts that a search looks at, for each run that has the question.
function* questionTexts(row) {
  for (const { run, question } of row.inRuns.values()) {
    const numbers = [question.q, ...(question.accepted ?? [])];
    for (const result of Object.values(question.methods)) numbers.push(...(result.rewrites ?? []), ...(result.asked ?? []), ...(result.answers ?? []));
    yield { run, numbers };
  }
}

function questionColumns(sides) {
  const shown = allSides().filter((side) => side === sides.from || side === sides.to || side.startsWith(`${knownRuns()[0].index}:`));
  const marked = (side) => (side === sides.from || side === sides.to ? "o chosen" : "o other");
  return [
    { key: "question", name: "question", class: "q", cell: (row) => [el("span", { class: "clamp", dir: "auto" }, textOf(firstOf(row).run, firstOf(row).question.q)), el("small", null, row.id)],
      value: (row) => textOf(firstOf(row).run, firstOf(row).question.q).toLowerCase() },
    { key: "tags", name: "tags", class: "t", cell: (row) => el("span", { class: "clamp" }, row.set === "guard" ? ["guard", ...row.tags].join(", ") : row.tags.join(", ")), value: (row) => row.tags.join() },
    ...shown.map((side) => ({ key: side, name: el("span", null, sideName(side).replace("_", "_\u200b")), class: marked(side),
      title: `Outcome of ${sideName(side)}`, cell: (row) => outcomeIcon(outcomeIn(row, side)), value: (row) => Object.keys(OUTCOMES).indexOf(outcomeIn(row, side)) })),
    { key: "change", name: "change", class: "w", title: `${sideName(sides.to)} compared with ${sideName(sides.from)}`, cell: (row) => el("span", { class: `change ${changeOf(row, sides).replace(" ", "-")}` }, changeOf(row, sides)), value: (row) => changeOf(row, sides) },
    { key: "gain", name: "score", class: "n", title: `Score of ${sideName(sides.to)} minus ${sideName(sides.from)}`, cell: (row) => signed(scoreGain(row, sides), 2), value: (row) => scoreGain(row, sides) },
    { key: "calls", name: "calls", class: "n", title: `Model calls of ${sideName(sides.to)}`, cell: (row) => fixed(resultOf(row, sides.to)?.calls, 0), value: (row) => resultOf(row, sides.to)?.calls },
  ];
}

const scoreGain = (row, sides) => (resultOf(row, sides.to)?.score ?? NaN) - (resultOf(row, sides.from)?.score ?? NaN);

const chosenMethod = new Map(); // key of a row -> side shown in its details

function questionDetail(row, sides) {
  const { run: shownRun, question } = firstOf(row);
  const host = el("div", { class: "ways" });
  const present = allSides().filter((side) => resultOf(row, side));
  const show = (side) => {
    chosenMethod.set(row.key, side);
    for (const each of switches) each.setAttribute("aria-pressed", String(each.dataset.side === side));
    const { run } = sideOf(side);
    const result = resultOf(row, side);
    host.replaceChildren(resultLine(result, outcomeIn(row, side)), ...evaluationWay(run, row.inRuns.get(run.index).question, result).flat());
  };
  const switches = present.map((side) => el("button", { type: "button", class: "chip", "data-side": side, "aria-pressed": "false", onclick: () => show(side) },
    outcomeIcon(outcomeIn(row, side)), sideName(side)));
  show([chosenMethod.get(row.key), sides.to, present[0]].find((side) => present.includes(side)));
  const accepted = (question.accepted ?? []).map((number) => textOf(shownRun, number));
  const text = textOf(shownRun, question.q);
  return [
    el("div", { class: "detail-head" }, el("p", { class: "full", dir: "auto" }, text),
      el("span", { class: "tools" }, copyButton("Copy question", text), copyButton("Copy link", () => linkTo(`q=${encodeURIComponent(row.id)}`)))),
    el("p", { class: "note" }, [row.id, row.set === "guard" ? "guard: should be refused" : null, ...row.tags].filter(Boolean).join(" · ")),
    accepted.length ? el("p", { class: "accepted" }, "Accepted: ", accepted.map((each, place) => [place ? ", " : "", el("code", { dir: "auto" }, each)])) : null,
    el("div", { class: "chips", role: "group", "aria-label": "Method" }, switches), host,
  ];
}

function resultLine(result, outcome) {
  const facts = [isNumber(result.score) && `score ${fixed(result.score, 2)}`, plural(result.calls ?? 0, "call"), isNumber(result.tokens) && plural(result.tokens, "token"), isNumber(result.seconds) && result.seconds >= 1e-3 && seconds(result.seconds)];
  return el("p", { class: "result" }, outcomeIcon(outcome), el("strong", null, OUTCOMES[outcome]), el("span", { class: "note" }, facts.filter(Boolean).join(" · ")),
    result.error ? el("span", { class: "worse", dir: "auto" }, typeof result.error === "object" ? Object.values(result.error).join(": ") : result.error) : null);
}

const linkTo = (hash) => `${location.href.split("#")[0]}#${hash}`;

// What a table and its filters need of an episode, worked out once.
function episodeFacts(episode) {
  if (episode.cache) return episode.cache;
  const { run, rows } = episode;
  const { transcripts } = run;
  const operators = rows.map((row) => operatorName(run, transcripts.op[row]));
  const last = rows.at(-1);
  const sum = (column) => rows.reduce((total, row) => total + (transcripts[column][row] ?? 0), 0);
  const score = transcripts.score[last];
  const failed = rows.some((row) => transcripts.valid[row] === false || transcripts.valid[row] === 0);
  const right = rows.map((row) => transcripts.parts[row]?.right).filter(isNumber);
  const outcome = failed ? "failed call" : right.length === 0 ? "no answer scored" : right.some((value) => value >= 0.5) ? "right answer found" : "no right answer";
  episode.cache = {
    operators, score, outcome, reward: sum("reward"), calls: sum("calls"), id: String(textOf(run, transcripts.id[last])),
    numbers: [transcripts.q[last], transcripts.id[last], ...rows.flatMap((row) => [transcripts.rewrite[row], transcripts.answer[row], transcripts.error[row]])],
  };
  return episode.cache;
}

const episodeRows = () => knownRuns().flatMap((run) => run.transcripts.episodes);

const EPISODE_OUTCOMES = ["right answer found", "no right answer", "no answer scored", "failed call"];

function episodeColumns() {
  const question = (row) => textOf(row.run, row.run.transcripts.q[row.rows[0]]);
  const several = knownRuns().length > 1;
  return [
    { key: "question", name: "question", class: "q", cell: (row) => [el("span", { class: "clamp", dir: "auto" }, question(row)), el("small", null, [several && runLabel(row.run), episodeFacts(row).id].filter(Boolean).join(" · "))], value: (row) => question(row).toLowerCase() },
    { key: "order", name: "episode", class: "n", cell: (row) => fixed(row.order + 1, 0), value: (row) => row.order },
    { key: "operators", name: "operators", class: "p", cell: (row) => el("span", { class: "clamp" }, episodeFacts(row).operators.join(" › ")), value: (row) => episodeFacts(row).operators.join() },
    { key: "outcome", name: "outcome", class: "w", cell: (row) => episodeFacts(row).outcome, value: (row) => EPISODE_OUTCOMES.indexOf(episodeFacts(row).outcome) },
    { key: "score", name: "score", class: "n", cell: (row) => fixed(episodeFacts(row).score, 2), value: (row) => episodeFacts(row).score },
    { key: "reward", name: "return", class: "n", cell: (row) => signed(episodeFacts(row).reward, 2), value: (row) => episodeFacts(row).reward },
    { key: "calls", name: "calls", class: "n", cell: (row) => fixed(episodeFacts(row).calls, 0), value: (row) => episodeFacts(row).calls },
  ];
}

function episodeDetail(row) {
  const text = textOf(row.run, row.run.transcripts.q[row.rows[0]]);
  const { transcripts } = row.run;
  const first = row.rows[0];
  return [
    el("div", { class: "detail-head" }, el("p", { class: "full", dir: "auto" }, text), el("span", { class: "tools" }, copyButton("Copy question", text))),
    el("p", { class: "note" }, `${episodeFacts(row).id} · environment ${transcripts.env[first]} · its episode ${transcripts.episode[first]} from its step ${transcripts.step[first]}`),
    el("div", { class: "ways" }, episodeWay(row.run, row)),
  ];
}
