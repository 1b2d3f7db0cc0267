// Real traffic: questions that were answered both ways, with the paired differences and the judge's choices.

const TRAFFIC_WAYS = { original: "original", rewritten: "rewritten", sent: "as sent" };
const TRAFFIC_ROWS = {
  refused: { name: "refused, %", show: percent, gap: points, lower: true }, not_sure: { name: "not sure, %", show: percent, gap: points, lower: true },
  fit: { name: "fit of answer and question", digits: 3 }, chars: { name: "characters", digits: 1 }, tokens: { name: "tokens", digits: 1 },
  calls: { name: "calls", digits: 2 }, seconds: { name: "seconds", digits: 2 },
};
const TRAFFIC_VERDICTS = { more: "more", less: "less", inconclusive: "inconclusive" };

// Only refusals and "not sure" have a better side.
const trafficClass = (row, { lower }) => (!lower || row.verdict === "inconclusive" ? null : row.verdict === "less" ? "better" : "worse");

function trafficRow(row) {
  const kind = TRAFFIC_ROWS[row.metric] ?? { name: row.metric, digits: 2 };
  const show = kind.show ?? ((value) => fixed(value, kind.digits));
  const gap = kind.gap ?? ((value) => signed(value, kind.digits));
  return [
    { text: kind.name, value: row.metric }, { text: show(row.theirs), value: row.theirs }, { text: show(row.ours), value: row.ours },
    { text: withInterval(gap(row.difference), row.ci, gap), value: row.difference, class: trafficClass(row, kind) },
    { text: fixed(row.more, 0), value: row.more }, { text: fixed(row.less, 0), value: row.less },
    { text: probability(row.p), value: row.p }, { text: TRAFFIC_VERDICTS[row.verdict] ?? row.verdict, value: row.verdict },
  ];
}

function trafficJudge(judge, ours) {
  if (!judge) return null;
  const words = { more: `prefers the ${TRAFFIC_WAYS[ours]} way`, less: "prefers the original way", inconclusive: "is inconclusive" };
  return el("p", { class: "judge" }, el("strong", null, `The judge ${words[judge.verdict]}: `),
    `${fixed(judge.wins, 0)} won, ${fixed(judge.losses, 0)} lost, ${fixed(judge.ties, 0)} tied; exact sign test p ${probability(judge.p)} (${judge.models.join(", ")}, asked in both orders).`);
}

function trafficComparison(found) {
  const title = `${TRAFFIC_WAYS[found.ours] ?? found.ours} compared with original`;
  return el("div", { class: "block" }, el("h4", null, title[0].toUpperCase() + title.slice(1)),
    table({
      caption: title, kind: "cards", header: ["figure", "original", TRAFFIC_WAYS[found.ours] ?? found.ours, "difference", "more", "less", "p", "verdict"],
      rows: found.rows.map(trafficRow),
    }), trafficJudge(found.judge, found.ours));
}

function drawTraffic(run) {
  const data = section(run, "traffic");
  if (!data) return null;
  const from = [data.first, data.last].map((time) => String(time ?? "").replace("T", " ").slice(0, 16));
  const counts = (names) => Object.entries(names).map(([name, count]) => `${name} ${fixed(count, 0)}`).join(", ");
  return [
    el("p", { class: "traffic-verdict" }, withMinus(data.sentence)),
    el("p", { class: "note" }, `${plural(data.pairs, "question")} answered both ways, ${fixed(data.questions, 0)} of them different, ${from.join(" to ")}. ` +
      `Models: ${counts(data.models)}. Modes: ${counts(data.modes)}. The policy or a guard left ${fixed(data.unchanged, 0)} as they were.`),
    el("p", { class: "note" }, "There is no gold for real traffic, so nothing here says which answer is right. Intervals are of paired differences, 95 %; p is McNemar's exact test."),
    data.comparisons.map(trafficComparison),
  ];
}

perRun("traffic", ["traffic"], drawTraffic, { empty: "No question of this run was answered both ways." });

// The part appears with its first pair; the page of a file of pairs has no parts on training, that of a plan no episodes.
view(["traffic", "answer", "questions"], () => {
  const known = knownRuns();
  const only = known.length > 0 && known.every((run) => section(run, "answer")?.only_traffic);
  const show = (id, is) => {
    for (const node of [document.getElementById(id), document.querySelector(`.top nav a[href="#${id}"]`)]) node.hidden = !is;
  };
  show("traffic", known.some((run) => section(run, "traffic")));
  const plans = known.length > 0 && known.every((run) => section(run, "answer")?.only_plan); // no episode, no row
  for (const id of ["source", "calls", "reproduce"]) show(id, !only);
  for (const id of ["policy", "learning"]) show(id, !only && !plans);
  show("questions", !plans || known.some((run) => run.questions.length));
});
