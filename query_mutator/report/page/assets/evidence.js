// Part 2, where it comes from: success against calls, the paired table, and success by tag.

const PERCENT = { show: percent, label: "success, %" };

function drawFront(run) {
  const dots = (section(run, "front")?.points ?? []).filter((point) => isNumber(point.calls) && isNumber(point.success));
  if (!dots.length) return null;
  return chart({
    id: `front:${run.index}`, title: "Success against calls", wide: true,
    note: "Up and left is better. The line is the Pareto front: no other method is both cheaper and more often right.",
    header: ["method", "calls per question", "success, %", "95 % interval", "on the front"],
    rows: () => dots.map((dot) => [dot.method, { text: fixed(dot.calls, 2), value: dot.calls }, { text: percent(dot.success), value: dot.success },
      interval(dot.success_ci, percent), dot.on_front ? "yes" : "no"]),
    draw: (width) => scatter({
      width, points: dots.map((dot) => ({ name: dot.method, color: methodColor(dot.method), x: dot.calls, y: dot.success, ci: dot.success_ci, front: dot.on_front })),
      x: { range: extent(dots.map((dot) => dot.calls), { zero: true }), show: compact, label: "calls per question" },
      y: { ...PERCENT, show: (share) => fixed(100 * share, 0), range: extent(dots.flatMap((dot) => [dot.success, ...(dot.success_ci ?? [])])) },
    }),
  });
}

function drawReliability(run) {
  const data = section(run, "p_right");
  if (!data?.reliability?.length) return null;
  const bins = data.reliability;
  const range = extent(bins.flatMap((bin) => [bin.mean_p, bin.rate, ...bin.rate_ci]), { zero: true });
  const share = (value) => fixed(100 * value, 0);
  return chart({
    id: `reliability:${run.index}`, title: "How good P(right) is",
    note: `${plural(data.answers ?? 0, "answer")} out of fold, in bins of equal size by P(right). On the dashed line P(right) says what happens. AUROC ${fixed(data.auroc, 3)}, Brier score ${fixed(data.brier, 3)}, calibration error ${fixed(data.calibration_error, 3)}.`,
    header: ["mean P(right), %", "right, %", "95 % interval", "answers"],
    rows: () => bins.map((bin) => [{ text: percent(bin.mean_p), value: bin.mean_p }, { text: percent(bin.rate), value: bin.rate },
      interval(bin.rate_ci, percent), { text: fixed(bin.n, 0), value: bin.n }]),
    draw: (width) => curves({
      width, height: Math.min(360, Math.max(240, width * 0.6)),
      x: { range, show: share, label: "mean P(right), %" }, y: { range, show: share, label: "right, %" },
      series: [
        { name: "as P(right) says", color: "var(--dim)", dash: true, thin: true, points: range.map((value) => [value, value]) },
        { name: "right", color: "var(--accent)", dots: true, points: bins.map((bin) => [bin.mean_p, bin.rate]), band: bins.map((bin) => [bin.mean_p, ...bin.rate_ci]) }],
    }),
  });
}

function drawPaired(run) {
  const rows = section(run, "paired")?.rows ?? [];
  if (!rows.length) return null;
  const unscored = rows.some((row) => row.unscored);
  return el("div", { class: "block" }, el("h4", null, "The policy against each baseline, question by question"),
    el("p", { class: "note" }, "Gained: right with the policy, wrong with the baseline. Lost: the other way round. p: McNemar's exact test. The interval is of the difference in success, in points."),
    table({
      caption: "The policy against each baseline, paired by question", kind: "cards paired",
      header: ["baseline", "gained", "lost", "same right", "same wrong", "difference", "p", ...(unscored ? ["unscored"] : [])],
      rows: rows.map((row) => [
        { text: el("span", { class: "method", style: { "--color": methodColor(row.baseline) } }, row.baseline), value: row.baseline },
        ...outcomeCells(row), ...(unscored ? [fixed(row.unscored ?? 0, 0)] : [])]),
    }));
}

// The original question, the policy, and the best of the others; the table has all methods.
function comparedMethods(run) {
  const rows = section(run, "answer")?.methods ?? [];
  const others = rows.filter((row) => !["identity", "policy"].includes(row.method)).sort((one, other) => other.success - one.success);
  return ["identity", others[0]?.method, "policy"].filter((name) => rows.some((row) => row.method === name));
}

function drawTags(run) {
  const tags = section(run, "tags")?.tags ?? [];
  if (!tags.length) return null;
  const shown = comparedMethods(run);
  const all = [...new Set(tags.flatMap((tag) => Object.keys(tag.methods)))];
  return chart({
    id: `tags:${run.index}`, title: "Success by tag", wide: true, note: "Number of questions in brackets; bars are 95 % intervals. All methods are in the numbers.",
    legend: shown.map((name) => ({ name, color: methodColor(name) })),
    header: ["tag", "questions", ...all],
    rows: () => tags.map((tag) => [tag.tag, fixed(tag.n, 0), ...all.map((name) => {
      const found = tag.methods[name];
      return found ? { text: rate(found.success, found.success_ci), value: found.success } : "–";
    })]),
    draw: (width) => dotRows({
      width, x: { range: [0, 1], show: (share) => fixed(100 * share, 0), label: "success, %" },
      rows: tags.map((tag) => ({
        name: `${tag.tag} (${tag.n})`,
        dots: shown.filter((name) => tag.methods[name]).map((name) => ({ name, color: methodColor(name), value: tag.methods[name].success, ci: tag.methods[name].success_ci })),
      })),
    }),
  });
}

perRun("source", ["front", "p_right", "paired", "tags"], (run) => {
  const parts = [drawFront(run), drawReliability(run), drawPaired(run), drawTags(run)].filter(Boolean);
  return parts.length ? parts : null;
}, { empty: "No held-out questions were evaluated yet." });
