// A chart: SVG drawn to the width at hand, values under pointer and arrow keys, its numbers as a table and as CSV.
//
// Ours and not a library: uPlot 1.6.32 (51 kB) has two of our five kinds of chart, curves and stacked areas, and these
// took 88 lines on top of it in place of 62 here. It paints a canvas: no text for a screen reader or a test of contrast,
// no CSS colors, no keys. Two such charts of 200 steps take 19 ms here and 11 to 22 ms there.

const METHOD_NOTES = {
  identity: "the original question", random: "random rewrites", best_single: "one fixed rewrite",
  best_of_k: "k tries, best fit", best_plan: "fixed plan of rewrites", policy: "what was trained",
};
const METHODS = Object.keys(METHOD_NOTES);
const CONTROLS = { ask: "var(--control-1)", undo: "var(--control-2)", submit: "var(--control-3)" };

function methodColor(name) {
  return METHODS.includes(name) ? `var(--m-${name.replaceAll("_", "-")})` : "var(--dim)";
}

// Operators have the colour of their place in the run's list, the same in all charts; the controls are grey.
function operatorColor(name) {
  if (name in CONTROLS) return CONTROLS[name];
  const names = knownRuns().flatMap((run) => section(run, "policy")?.operators ?? []).filter((each) => !(each in CONTROLS));
  const place = [...new Set(names)].indexOf(name);
  return place < 0 ? "var(--rest)" : `var(--c${place % 16})`;
}

const RUN_COLORS = [2, 1, 5, 3, 4, 7, 6, 8];
const runColor = (run) => `var(--c${RUN_COLORS[run.index % RUN_COLORS.length]})`;

const openTables = new Set(); // charts whose numbers are shown
const redraw = new WeakMap();
const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) redraw.get(target)?.(contentRect.width);
});

// `draw(width)` returns { svg, marks, by }; a mark is { x, y, lines } where a line is { text, color }.
function chart({ id, title, note, legend, header, rows, draw, wide }) {
  const plot = el("div", { class: "plot" });
  const numbers = el("div", { class: "numbers" });
  const file = `${title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv`;
  const plain = () => rows().map((row) => row.map((cell) => (cell && typeof cell === "object" ? cell.value ?? cell.text : cell)));
  const show = (open) => {
    toggle.setAttribute("aria-expanded", String(open));
    openTables[open ? "add" : "delete"](id);
    numbers.replaceChildren(...(open ? [table({ caption: title, header, rows: rows(), kind: "plain" })] : []));
  };
  const toggle = button("Numbers", () => show(!openTables.has(id)), { "aria-expanded": "false", "data-focus": `n:${id}` });
  const save = button("CSV", () => download(file, csv(header, plain())), { "data-focus": `c:${id}` });
  let drawn = 0;
  redraw.set(plot, (width) => {
    if (Math.abs(width - drawn) < 1 || width < 40) return;
    drawn = width;
    mount(plot, title, draw(Math.floor(width)), id);
  });
  resized.observe(plot);
  if (openTables.has(id)) show(true);
  return el("figure", { class: wide ? "chart wide" : "chart", "data-chart": id },
    el("figcaption", null, el("h4", null, title), el("span", { class: "tools" }, toggle, save)),
    note && el("p", { class: "note" }, note),
    legend?.length ? el("ul", { class: "legend" }, legend.map(legendItem)) : null,
    plot, numbers);
}

const legendItem = ({ name, color, dash }) =>
  el("li", null, el("span", { class: dash ? "swatch dash" : "swatch", style: { "--color": color } }), name);

function mount(plot, title, { svg: drawing, marks, by }, id) {
  const keepFocus = plot.contains(document.activeElement);
  drawing.setAttribute("tabindex", "0");
  drawing.setAttribute("role", "img");
  drawing.setAttribute("data-focus", `s:${id}`);
  drawing.setAttribute("aria-label", `Chart: ${title}. Arrow keys read its values; the Numbers button shows a table.`);
  const cursor = svg("circle", { class: "cursor", r: 5, visibility: "hidden" });
  drawing.append(cursor);
  let current = -1;
  const pick = (index, spoken) => {
    current = index;
    const mark = marks[index];
    for (const [key, value] of [["cx", mark.x], ["cy", mark.y], ["visibility", "visible"]]) cursor.setAttribute(key, value);
    const box = drawing.getBoundingClientRect();
    showTip(box.left + mark.x, box.top + mark.y, mark.lines);
    if (spoken) announce(mark.lines.map((line) => line.text).join(", "));
  };
  const leave = () => {
    current = -1;
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const index = nearest(marks, event.clientX - box.left, event.clientY - box.top, by);
    if (index >= 0 && index !== current) pick(index, false);
  });
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step || !marks.length) return;
    event.preventDefault();
    pick(Math.min(marks.length - 1, Math.max(0, current + step)), true);
  });
  plot.replaceChildren(drawing);
  if (keepFocus) drawing.focus({ preventScroll: true });
}

function nearest(marks, x, y, by) {
  let best = -1;
  let distance = Infinity;
  marks.forEach((mark, index) => {
    const apart = Math.abs(mark.x - x) + (by === "x" ? 0 : Math.abs(mark.y - y));
    if (apart < distance) [best, distance] = [index, apart];
  });
  return best;
}

function showTip(x, y, lines) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...lines.map(({ text, color }) =>
    el("div", null, color ? el("span", { class: "swatch", style: { "--color": color } }) : null, text)));
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = x + 14 + width > document.documentElement.clientWidth ? x - width - 14 : x + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y - height / 2, document.documentElement.clientHeight - height - 4))}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
