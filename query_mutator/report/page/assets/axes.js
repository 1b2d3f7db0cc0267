// Scales, ticks and axes of the charts, in pixels of the drawing.

function ticks(low, high, count, least = 0) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= Math.max(least, rough * 0.999)) ?? least;
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return found;
}

// The range of values, widened to ticks; an empty or single value gets some room.
function extent(values, { zero = false, count = 5 } = {}) {
  const numbers = values.filter(isNumber);
  let low = zero ? 0 : Infinity;
  let high = zero ? 0 : -Infinity;
  for (const value of numbers) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!(high >= low)) return [0, 1];
  if (high === low) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const marks = ticks(low, high, count);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

// An empty drawing with both axes; `x` and `y` are { range, label, show }. Returns { node, at, box }.
function axes({ width, height, x, y, left = 48, right = 22 }) {
  const box = { left, right: width - right, top: y.label ? 24 : 12, bottom: height - 40 };
  const at = {
    x: (value) => box.left + ((value - x.range[0]) / (x.range[1] - x.range[0])) * (box.right - box.left),
    y: (value) => box.bottom - ((value - y.range[0]) / (y.range[1] - y.range[0])) * (box.bottom - box.top),
  };
  const node = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  for (const tick of ticks(...y.range, 4)) {
    node.append(
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at.y(tick), y2: at.y(tick) }),
      svg("text", { class: "tick", x: box.left - 8, y: at.y(tick) + 4, "text-anchor": "end" }, y.show(tick)));
  }
  for (const tick of ticks(...x.range, Math.max(2, width / 110), x.least)) {
    node.append(svg("text", { class: "tick", x: at.x(tick), y: box.bottom + 18, "text-anchor": "middle" }, x.show(tick)));
  }
  node.append(
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    svg("text", { class: "label", x: 0, y: 10 }, y.label),
    svg("text", { class: "label", x: box.right, y: height - 4, "text-anchor": "end" }, x.label));
  return { node, at, box };
}

// A path through [x, y] points; a null value ends a piece.
function path(pairs) {
  let pen = false;
  let text = "";
  for (const [x, y] of pairs) {
    if (!isNumber(x) || !isNumber(y)) { pen = false; continue; }
    text += `${pen ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`;
    pen = true;
  }
  return text;
}

const area = (upper, lower) => (upper.length ? `${path(upper)}L${path([...lower].reverse()).slice(1)}Z` : "");

// Move labels apart: at least `gap` pixels between neighbours, as near to where they belong as that allows.
function spread(labels, gap, top, bottom) {
  const sorted = [...labels].sort((one, other) => one.y - other.y);
  let last = top - gap;
  for (const label of sorted) last = label.y = Math.max(label.y, last + gap);
  let next = bottom + gap;
  for (const label of sorted.reverse()) next = label.y = Math.min(label.y, next - gap);
  return labels;
}
