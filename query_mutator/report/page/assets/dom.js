// Elements, numbers as text, and the small tools of the page. All text becomes text nodes, never markup.

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) node.style.setProperty(key, part);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const MINUS = "−";

// Formatters are kept: `toLocaleString` makes one for each number, which was most of the time of a chart.
const formatters = new Map();

function formatter(key, options) {
  if (!formatters.has(key)) formatters.set(key, new Intl.NumberFormat("en-US", options));
  return formatters.get(key);
}

function fixed(value, digits) {
  if (!isNumber(value)) return "–";
  const text = formatter(digits, { minimumFractionDigits: digits, maximumFractionDigits: digits }).format(value);
  return text.replace("-", MINUS).replace(/^−(0(\.0*)?)$/, "$1");
}

// Shares are shown in percent, differences of shares in points with a sign.
const percent = (share) => (isNumber(share) ? fixed(100 * share, 1) : "–");
const signed = (value, digits) => (isNumber(value) && value > 0 ? "+" : "") + fixed(value, digits);
const points = (share) => (isNumber(share) ? signed(100 * share, 1) : "–");
const interval = (ci, show) => (ci && isNumber(ci[0]) ? `[${show(ci[0])}, ${show(ci[1])}]` : "");

function compact(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-4) return value.toExponential(1).replace("-", MINUS);
  if (size >= 1e6) return fixed(value / 1e6, 1) + "M";
  if (size >= 1e4) return fixed(value / 1e3, 1) + "k";
  return formatter("compact", { maximumSignificantDigits: 3, useGrouping: false }).format(value).replace("-", MINUS);
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-4) return `${fixed(1e6 * value, 1)} µs`;
  if (value < 1) return `${fixed(1000 * value, value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${fixed(value, 1)} s`;
  return value < 7200 ? `${fixed(value / 60, 0)} min` : `${fixed(value / 3600, 1)} h`;
}

function probability(p) {
  if (!isNumber(p)) return "–";
  return p < 0.001 ? "< 0.001" : fixed(p, 3);
}

const plural = (count, noun) => `${fixed(count, 0)} ${noun}${count === 1 ? "" : "s"}`;

function announce(text) {
  document.getElementById("announce").textContent = text;
}

function button(label, onclick, attributes) {
  return el("button", { type: "button", class: "quiet", ...attributes, onclick }, label);
}

// Copy text; falls back to a selection where the clipboard interface is not available (file pages of some browsers).
async function copy(text, source) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    source.focus();
  }
  const label = source.dataset.label ?? (source.dataset.label = source.textContent);
  source.textContent = done ? "Copied" : "Not copied";
  announce(source.textContent);
  setTimeout(() => { source.textContent = label; }, 1500);
}

const copyButton = (label, text, attributes) =>
  button(label, (event) => copy(typeof text === "function" ? text() : text, event.currentTarget), attributes);

function csv(header, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [header, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// A table with column headers, and a row header in the first column. A cell is text, a node, or {text, value, class}.
function table({ caption, header, rows, kind }) {
  const line = (row) => el("tr", { role: "row" }, row.map((cell, column) => tableCell(cell, column, header[column])));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { class: kind, role: "table" },
      el("caption", { class: "hidden" }, caption),
      el("thead", { role: "rowgroup" },
        el("tr", { role: "row" }, header.map((name) => el("th", { scope: "col", role: "columnheader" }, name)))),
      el("tbody", { role: "rowgroup" }, rows.map(line))));
}

function tableCell(cell, column, name) {
  const rich = cell !== null && typeof cell === "object" && !(cell instanceof Node) && !Array.isArray(cell);
  const { text, value, ...rest } = rich ? cell : { text: cell };
  const attributes = { "data-label": name, "data-value": value, ...rest };
  return column === 0
    ? el("th", { scope: "row", role: "rowheader", ...attributes }, text ?? "–")
    : el("td", { role: "cell", ...attributes }, text ?? "–");
}

// Replace a host's children; the focused element keeps the focus if one with the same data-focus comes back.
function replace(host, ...children) {
  const focused = host.contains(document.activeElement) ? document.activeElement.closest("[data-focus]") : null;
  const scrolled = new Map([...host.querySelectorAll("[data-keep]")].map((node) => [node.dataset.keep, node.scrollLeft]));
  host.replaceChildren(...children.flat(3).filter(Boolean));
  for (const node of host.querySelectorAll("[data-keep]")) node.scrollLeft = scrolled.get(node.dataset.keep) ?? 0;
  if (focused) host.querySelector(`[data-focus="${CSS.escape(focused.dataset.focus)}"]`)?.focus({ preventScroll: true });
}
