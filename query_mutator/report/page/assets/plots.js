// The four kinds of chart: scatter with a front, curves with bands, stacked shares, and rows of dots with intervals.

// points: { name, color, x, y, ci, front }
function scatter({ points: dots, x, y, width }) {
  const height = Math.min(420, Math.max(300, width * 0.5));
  const { node, at, box } = axes({ width, height, x, y });
  const front = dots.filter((dot) => dot.front).sort((one, other) => one.x - other.x);
  const stairs = front.flatMap((dot, place) => [...(place ? [[dot.x, front[place - 1].y]] : []), [dot.x, dot.y]]);
  if (front.length) stairs.push([x.range[1], front.at(-1).y]);
  node.append(svg("path", { class: "front", d: path(stairs.map(([px, py]) => [at.x(px), at.y(py)])) }));
  const marks = dots.map((dot) => ({ x: at.x(dot.x), y: at.y(dot.y), dot, lines: [
    { text: dot.name, color: dot.color }, { text: `${y.show(dot.y)} ${interval(dot.ci, y.show)}` },
    { text: `${compact(dot.x)} calls` }, ...(dot.front ? [{ text: "on the front" }] : [])] }));
  for (const { x: cx, y: cy, dot } of marks) {
    if (dot.ci) node.append(svg("line", { class: "whisker", x1: cx, x2: cx, y1: at.y(dot.ci[0]), y2: at.y(dot.ci[1]), style: { stroke: dot.color } }));
    node.append(svg("circle", { class: dot.front ? "dot" : "dot hollow", cx, cy, r: 6, style: { "--color": dot.color } }));
  }
  for (const { label, x: tx, y: ty, anchor } of placeLabels(marks, box)) {
    node.append(svg("text", { class: "name halo", x: tx, y: ty, "text-anchor": anchor }, label));
  }
  return { svg: node, marks, by: "xy" };
}

const MOST_LABEL_CHARS = 36; // the whole name is in the values under the pointer

// Each label goes right of, left of, above or below its dot: the first place that is free of dots and labels.
function placeLabels(marks, box) {
  const taken = marks.map(({ x, y }) => [x - 8, y - 8, x + 8, y + 8]);
  const meets = (a) => a[0] < box.left || a[2] > box.right + 8 || taken.some((b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]);
  return marks.map(({ x, y, dot }) => {
    const label = dot.name.length > MOST_LABEL_CHARS ? `${dot.name.slice(0, MOST_LABEL_CHARS - 1)}…` : dot.name;
    const size = label.length * 7.2;
    const places = [
      { x: x + 11, y: y + 4, anchor: "start", box: [x + 10, y - 8, x + 11 + size, y + 8] },
      { x: x - 11, y: y + 4, anchor: "end", box: [x - 11 - size, y - 8, x - 10, y + 8] },
      { x: x + 9, y: y - 9, anchor: "start", box: [x + 8, y - 21, x + 9 + size, y - 8.5] },
      { x: x + 9, y: y + 18, anchor: "start", box: [x + 8, y + 8.5, x + 9 + size, y + 21] },
      { x: x - 9, y: y - 9, anchor: "end", box: [x - 9 - size, y - 21, x - 8, y - 8.5] },
      { x: x - 9, y: y + 18, anchor: "end", box: [x - 9 - size, y + 8.5, x - 8, y + 21] },
    ];
    const place = places.find((each) => !meets(each.box)) ?? places[0];
    taken.push(place.box);
    return { ...place, label };
  });
}

// series: { name, color, points: [x, y][], thin, dash, dots, band: [x, low, high][] }; lines: { name, color, y } across the chart
function curves({ series, lines = [], x, y, width, height = 260 }) {
  const room = lines.length ? Math.max(...lines.map(({ name }) => name.length)) * 6.6 + 14 : 22;
  const { node, at, box } = axes({ width, height, x, y, left: 52, right: room });
  const pixels = (pairs, place) => pairs.map((pair) => [at.x(pair[0]), isNumber(pair[place]) ? at.y(pair[place]) : null]);
  for (const { band, color } of series) {
    const solid = (band ?? []).filter((each) => isNumber(each[1]) && isNumber(each[2]));
    if (solid.length > 1) node.append(svg("path", { class: "band", d: area(pixels(solid, 2), pixels(solid, 1)), style: { fill: color } }));
  }
  for (const { name, color, y: value } of lines) {
    node.append(svg("line", { class: "reference", x1: box.left, x2: box.right, y1: at.y(value), y2: at.y(value), style: { stroke: color } }));
  }
  const labels = spread(lines.map(({ name, y: value }) => ({ name, y: at.y(value) + 4 })), 13, box.top + 6, box.bottom);
  for (const { name, y: place } of labels) node.append(svg("text", { class: "label", x: box.right + 7, y: place }, name));
  for (const { color, points: pairs, thin, dash, dots } of series) {
    node.append(svg("path", { class: ["curve", thin && "thin", dash && "dash"].filter(Boolean).join(" "), d: path(pixels(pairs, 1)), style: { stroke: color } }));
    const known = pairs.filter((pair) => isNumber(pair[1]));
    if (dots || known.length < 2) for (const [px, py] of known) node.append(svg("circle", { class: "dot", cx: at.x(px), cy: at.y(py), r: 3.5, style: { "--color": color } }));
  }
  return { svg: node, marks: curveMarks(series, at, x, y), by: "x" };
}

function curveMarks(series, at, x, y) {
  const byX = new Map();
  for (const { name, color, points: pairs, band } of series) {
    pairs.forEach(([px, py], index) => {
      if (!isNumber(py)) return;
      const mark = byX.get(px) ?? { x: at.x(px), y: at.y(py), place: px, lines: [{ text: `${x.label} ${x.show(px)}` }] };
      const around = band?.[index] ? ` ${interval([band[index][1], band[index][2]], y.show)}` : "";
      mark.lines.push({ text: `${name} ${y.show(py)}${around}`, color });
      byX.set(px, mark);
    });
  }
  return [...byX.values()].sort((one, other) => one.place - other.place);
}

// layers: { name, color, shares: number[] } stacked over steps, bottom first
function stackedAreas({ steps, layers, x, width, height = 280 }) {
  const y = { range: [0, 1], show: (share) => `${fixed(100 * share, 0)} %`, label: "" };
  const { node, at } = axes({ width: width - 92, height, x, y });
  node.setAttribute("width", width);
  node.setAttribute("viewBox", `0 0 ${width} ${height}`);
  let floor = steps.map(() => 0);
  const labels = [];
  const stacks = layers.map(({ name, color, shares }) => {
    const roof = floor.map((value, index) => value + (shares[index] ?? 0));
    const line = (values) => steps.map((step, index) => [at.x(step), at.y(Math.min(1, values[index]))]);
    node.append(svg("path", { class: "layer", d: area(line(roof), line(floor)), style: { fill: color } }));
    if (shares.at(-1) > 0.03) labels.push({ name, y: at.y((floor.at(-1) + roof.at(-1)) / 2) + 4 });
    floor = roof;
    return roof;
  });
  for (const { name, y: place } of spread(labels, 14, 16, height - 40)) {
    node.append(svg("text", { class: "name", x: width - 96, y: place }, name));
  }
  const marks = steps.map((step, index) => ({ x: at.x(step), y: at.y(Math.min(1, stacks.at(-1)?.[index] ?? 0)), lines: [
    { text: `step ${fixed(step, 0)}` },
    ...layers.filter(({ shares }) => shares[index] > 0.005).reverse()
      .map(({ name, color, shares }) => ({ text: `${name} ${percent(shares[index])} %`, color }))] }));
  return { svg: node, marks, by: "x" };
}

// rows: { name, counts: {key: n} }; one bar of shares for each row
function stackedBars({ rows, keys, color, width }) {
  const line = 34;
  const letter = 6.7;
  const left = Math.min(width * 0.42, Math.max(...rows.map(({ name }) => name.length)) * letter + 16);
  const room = Math.floor((left - 16) / letter);
  const short = (name) => (name.length > room + 1 ? `${name.slice(0, room)}…` : name);
  const right = 52;
  const height = rows.length * line + 26;
  const node = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const marks = [];
  rows.forEach(({ name, counts }, index) => {
    const total = keys.reduce((sum, key) => sum + (counts[key] ?? 0), 0);
    const top = index * line + 4;
    let from = left;
    for (const key of keys) {
      const count = counts[key] ?? 0;
      if (!count) continue;
      const size = (count / total) * (width - left - right);
      node.append(svg("rect", { class: "layer", x: from, y: top, width: Math.max(0.5, size), height: line - 10, style: { fill: color(key) } }));
      marks.push({ x: from + size / 2, y: top + (line - 10) / 2, lines: [
        { text: name }, { text: `${key} ${fixed(count, 0)} of ${fixed(total, 0)}: ${percent(count / total)} %`, color: color(key) }] });
      from += size;
    }
    node.append(
      svg("text", { class: "name", x: left - 10, y: top + 16, "text-anchor": "end" }, short(name)),
      svg("text", { class: "tick", x: width, y: top + 16, "text-anchor": "end" }, total ? fixed(total, 0) : "none"));
  });
  node.append(svg("text", { class: "label", x: width, y: height - 6, "text-anchor": "end" }, "chosen"));
  return { svg: node, marks, by: "xy" };
}

// rows: { name, dots: { name, color, value, ci, note }[] }; `zero` draws a line at 0
function dotRows({ rows, x, width, zero }) {
  const left = Math.min(width * 0.42, Math.max(...rows.map(({ name }) => name.length)) * 6.7 + 16);
  const per = Math.max(1, ...rows.map((row) => row.dots.length));
  const line = Math.max(28, 12 + per * 11);
  const height = rows.length * line + 52;
  const { node, at, box } = axes({ width, height, x, y: { range: [0, 1], show: () => "", label: "" }, left });
  for (const grid of node.querySelectorAll(".grid")) grid.remove();
  for (const tick of ticks(...x.range, Math.max(2, width / 110))) {
    node.append(svg("line", { class: zero && tick === 0 ? "axis" : "grid", x1: at.x(tick), x2: at.x(tick), y1: box.top, y2: box.bottom }));
  }
  const marks = [];
  rows.forEach(({ name, dots }, index) => {
    const top = box.top + index * line;
    node.append(svg("text", { class: "name", x: left - 12, y: top + line / 2 + 4, "text-anchor": "end" }, name));
    dots.forEach((dot, place) => {
      if (!isNumber(dot.value)) return;
      const cy = top + line / 2 + (place - (dots.length - 1) / 2) * 11;
      if (dot.ci) node.append(svg("line", { class: "whisker", x1: at.x(Math.max(x.range[0], dot.ci[0])), x2: at.x(Math.min(x.range[1], dot.ci[1])), y1: cy, y2: cy, style: { stroke: dot.color } }));
      node.append(svg("circle", { class: dot.hollow ? "dot hollow" : "dot", cx: at.x(dot.value), cy, r: 4.5, style: { "--color": dot.color } }));
      marks.push({ x: at.x(dot.value), y: cy, lines: [{ text: name },
        { text: `${dot.name} ${x.show(dot.value)} ${interval(dot.ci, x.show)}`, color: dot.color }, ...(dot.note ? [{ text: dot.note }] : [])] });
    });
  });
  return { svg: node, marks, by: "xy" };
}
