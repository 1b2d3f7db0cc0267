// Part 3, what the policy does: operators by step, tag and first verdict, what each gains, first rewrites over training.

const VERDICTS = { right: "right", wrong: "wrong", refused: "refused", not_sure: "not sure", none: "not asked yet" };

function operatorBars(run, title, note, rows, first) {
  const used = (section(run, "policy").operators ?? []).filter((name) => rows.some(({ counts }) => counts[name]));
  const extra = [...new Set(rows.flatMap(({ counts }) => Object.keys(counts)))].filter((name) => !used.includes(name));
  const keys = [...used, ...extra];
  const filled = rows.filter(({ counts }) => keys.some((key) => counts[key]));
  if (!filled.length) return null;
  return chart({
    id: `${title}:${run.index}`, title, note, legend: keys.map((name) => ({ name, color: operatorColor(name) })),
    header: [first, ...keys],
    rows: () => filled.map(({ name, counts }) => [name, ...keys.map((key) => ({ text: fixed(counts[key] ?? 0, 0), value: counts[key] ?? 0 }))]),
    draw: (width) => stackedBars({ rows: filled, keys, color: operatorColor, width }),
  });
}

const sentence = (text) => (text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "");

function drawGains(run, data) {
  const rows = (data.gains ?? []).filter((row) => isNumber(row.gain) || isNumber(row.random));
  if (!rows.length) return null;
  const dots = (row) => [
    { name: `chosen ${fixed(row.chosen, 0)} times:`, color: "var(--accent)", value: row.gain, ci: row.gain_ci },
    { name: `at random ${fixed(row.random_n ?? 0, 0)} times:`, color: "var(--dim)", value: row.random, ci: row.random_ci, hollow: true }];
  const values = rows.flatMap((row) => dots(row).flatMap((dot) => [dot.value, ...(dot.ci ?? [])]));
  return chart({
    id: `gains:${run.index}`, title: "What each operator gains", wide: true,
    note: ["Change of score, where the policy chooses the operator and where it was chosen at random, with 95 % intervals.", sentence(data.gains_note)].filter(Boolean).join(" "),
    legend: [{ name: "where chosen", color: "var(--accent)" }, { name: "at random", color: "var(--dim)" }],
    header: ["operator", "chosen", "gain", "95 % interval", "random", "gain at random", "95 % interval at random"],
    rows: () => rows.map((row) => [row.operator, { text: fixed(row.chosen, 0), value: row.chosen },
      { text: signed(row.gain, 3), value: row.gain }, interval(row.gain_ci, (value) => signed(value, 3)),
      { text: fixed(row.random_n ?? 0, 0), value: row.random_n }, { text: signed(row.random, 3), value: row.random }, interval(row.random_ci, (value) => signed(value, 3))]),
    draw: (width) => dotRows({
      width, zero: true, x: { range: extent([...values, 0], { count: 6 }), show: (value) => signed(value, 2), label: "change of score" },
      rows: rows.map((row) => ({ name: row.operator, dots: dots(row) })),
    }),
  });
}

// The share of each first operator over training; the smallest ones are one layer, so that the colours stay apart.
function drawFirst(run, data) {
  const steps = data.first?.step ?? [];
  if (steps.length < 2) return null;
  const mean = (shares) => shares.reduce((sum, share) => sum + share, 0) / shares.length;
  const names = Object.keys(data.first.shares).sort((one, other) => mean(data.first.shares[other]) - mean(data.first.shares[one]));
  const big = names.slice(0, 9).filter((name) => Math.max(...data.first.shares[name]) > 0.02);
  const rest = names.filter((name) => !big.includes(name));
  const layers = [...rest.length ? [{ name: "others", color: "var(--rest)", shares: steps.map((_, index) => rest.reduce((sum, name) => sum + data.first.shares[name][index], 0)) }] : [],
    ...big.map((name) => ({ name, color: operatorColor(name), shares: data.first.shares[name] })).reverse()];
  return chart({
    id: `first:${run.index}`, title: "First action over training", wide: true,
    note: "Share of episodes that begin with each operator. One layer that fills the picture early is a collapse.",
    header: ["step", ...names],
    rows: () => steps.map((step, index) => [fixed(step, 0), ...names.map((name) => ({ text: percent(data.first.shares[name][index]), value: data.first.shares[name][index] }))]),
    draw: (width) => stackedAreas({ steps, layers, width, x: { range: [steps[0], steps.at(-1)], show: compact, label: "environment steps" } }),
  });
}

function tiles(facts) {
  return el("dl", { class: "tiles" }, facts.filter(Boolean).map(({ name, value, note }) =>
    el("div", null, el("dt", null, name), el("dd", null, value, note && el("small", null, note)))));
}

function drawPolicy(run) {
  const data = section(run, "policy");
  if (!data) return null;
  const share = (count) => (data.episodes ? `${percent(count / data.episodes)} per 100 episodes` : null);
  const named = (rows, key, name) => (rows ?? []).map((row) => ({ name: name(row[key]), counts: row.counts }));
  return [
    data.source && el("p", { class: "note" }, `Actions counted in: ${data.source}.`),
    tiles([{ name: "episodes", value: fixed(data.episodes ?? 0, 0) }, { name: "undo", value: fixed(data.undo ?? 0, 0), note: share(data.undo ?? 0) },
      { name: "submit", value: fixed(data.submit ?? 0, 0), note: share(data.submit ?? 0) }]),
    el("div", { class: "charts" },
      operatorBars(run, "Operators by step", "What is chosen at each step of an episode.", named(data.by_step, "step", (step) => `step ${step + 1}`), "step"),
      operatorBars(run, "Operators by tag", "A question counts for each of its tags.", named(data.by_tag, "tag", String), "tag"),
      operatorBars(run, "Operators by verdict", "After what the last answer seen was judged to be.", named(data.by_verdict, "verdict", (name) => VERDICTS[name] ?? name), "verdict"),
      drawGains(run, data), drawFirst(run, data)),
  ];
}

perRun("policy", ["policy"], drawPolicy, { empty: "No steps recorded yet." });
