// Part 4, learning: return, validation success and the learner's losses over training, of all runs in one chart.

const SHARES = new Set(["share"]);

const metric = (run, key) => {
  const column = run.metrics.columns[key];
  return column ? run.metrics.steps.map((step, index) => [step, column[index]]).filter((pair) => isNumber(pair[1])) : [];
};

// Mean, smallest and largest value over runs at the steps that all of them have.
function overRuns(all) {
  const maps = all.map((pairs) => new Map(pairs));
  const steps = all[0].map(([step]) => step).filter((step) => maps.every((map) => map.has(step)));
  return steps.map((step) => {
    const values = maps.map((map) => map.get(step));
    return { step, mean: values.reduce((sum, value) => sum + value, 0) / values.length, low: Math.min(...values), high: Math.max(...values) };
  });
}

// One run: a curve of the key's colour. Two: a curve for each run. More: thin lines, their mean and their range.
function seriesOf(key, color, name, dash) {
  const present = knownRuns().map((run) => ({ run, pairs: metric(run, key) })).filter(({ pairs }) => pairs.length);
  if (present.length === 0) return [];
  if (present.length === 1) return [{ name, color, points: present[0].pairs, key, run: present[0].run }];
  const each = present.map(({ run, pairs }) => ({ name: `${name} · ${runLabel(run)}`, color: runColor(run), points: pairs, thin: present.length > 2, dash, key, run }));
  if (present.length === 2) return each;
  const mean = overRuns(present.map(({ pairs }) => pairs));
  if (mean.length < 2) return each;
  return [...each, { name: `${name} · mean of ${present.length} runs`, color, points: mean.map((row) => [row.step, row.mean]), band: mean.map((row) => [row.step, row.low, row.high]), key }];
}

// The interval of a metric is in two others: KEY_low and KEY_high.
function withBand(series) {
  if (series.band || !series.run || knownRuns().length > 2) return series;
  const [low, high] = ["low", "high"].map((end) => new Map(metric(series.run, `${series.key}_${end}`)));
  return low.size ? { ...series, band: series.points.map(([step]) => [step, low.get(step), high.get(step)]) } : series;
}

function learningChart({ title, unit, keys: all }, lines) {
  const keys = all.filter((key) => !/_(low|high)$/.test(key));
  const validation = keys.includes("validation/success");
  const colors = validation ? ["var(--accent)", "var(--m-identity)", "var(--m-random)"] : keys.map((_, index) => (index ? `var(--c${(index * 5 + 1) % 12})` : "var(--accent)"));
  const series = keys.flatMap((key, index) => seriesOf(key, colors[index % colors.length], keys.length > 1 ? key.split("/").pop().replaceAll("_", " ") : title, index > 0)).map(withBand);
  if (!series.length) return null;
  const references = validation ? lines.filter((line) => isNumber(line.success)).map((line) => ({ name: line.name, of: line.of, y: line.success, color: methodColor(line.name) })) : [];
  const share = SHARES.has(unit);
  const show = share ? percent : compact;
  const values = [...series.flatMap((each) => [...each.points.map((pair) => pair[1]), ...(each.band ?? []).flatMap((row) => row.slice(1))]), ...references.map((line) => line.y)];
  const steps = series.flatMap((each) => each.points.map((pair) => pair[0]));
  return chart({
    id: `learning:${title}`, title, wide: validation,
    note: validation ? validationNote(references) : null,
    legend: knownRuns().length === 2 ? knownRuns().map((run) => ({ name: runLabel(run), color: runColor(run) }))
      : series.filter((each) => !each.thin).length > 1 ? series.filter((each) => !each.thin) : null,
    header: ["step", ...series.map((each) => each.name)],
    rows: () => seriesTable(series, show),
    draw: (width) => curves({
      series, lines: references, width, height: validation ? 320 : 220,
      x: { range: extentOf(steps), show: compact, least: 1, label: "environment steps" },
      y: { range: share && validation ? [0, Math.max(...extent(values, { zero: true }))] : extent(values), show: share ? (value) => compact(100 * value) : compact, label: share ? "%" : unit === "1" ? "" : unit },
    }),
  });
}

function validationNote(references) {
  const asked = knownRuns().flatMap((run) => metric(run, "validation/questions").slice(-1).map((pair) => pair[1]));
  const sample = asked.length ? `The curve is the greedy policy on ${[...new Set(asked)].map((n) => fixed(n, 0)).join(" or ")} validation questions` : "The curve is the greedy policy on validation questions";
  const band = knownRuns().length > 2 ? "the band goes from the lowest to the highest run" : "the band is Wilson's 95 % interval";
  const sets = [...new Set(references.map((line) => `${line.name} on ${line.of ?? "held-out questions"}`))];
  return `${sample}; ${band}.${sets.length ? ` Dashed: ${sets.join(", ")}.` : ""}`;
}

const extentOf = (steps) => {
  const low = steps.reduce((least, step) => Math.min(least, step), Infinity);
  const high = steps.reduce((most, step) => Math.max(most, step), -Infinity);
  return high > low ? [low, high] : [low - 1, low + 1];
};

function seriesTable(series, show) {
  const maps = series.map((each) => new Map(each.points));
  const steps = [...new Set(series.flatMap((each) => each.points.map((pair) => pair[0])))].sort((one, other) => one - other);
  return steps.map((step) => [fixed(step, 0), ...maps.map((map) => ({ text: show(map.get(step)), value: map.get(step) }))]);
}

// The charts that the runs offer, each once: those of calls have keys of the client.
function chartsOfRuns(ofCalls) {
  const all = knownRuns().flatMap((run) => section(run, "learning")?.charts ?? []);
  return [...new Map(all.map((each) => [each.title, each])).values()].filter((each) => each.keys[0].startsWith("llm/") === ofCalls);
}

view(["learning", "metrics", "answer"], () => {
  const host = hostOf("learning");
  const sections = knownRuns().map((run) => section(run, "learning")).filter(Boolean);
  const lines = sections.find((each) => each.lines?.length)?.lines ?? [];
  const isValidation = (each) => each.keys.includes("validation/success");
  const ordered = chartsOfRuns(false).sort((one, other) => isValidation(other) - isValidation(one));
  const drawn = ordered.map((each) => learningChart(each, lines)).filter(Boolean);
  replace(host, drawn.length ? el("div", { class: "charts" }, drawn) : el("p", { class: "note" }, "No metrics recorded."));
});
