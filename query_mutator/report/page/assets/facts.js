// Parts 5 and 7: calls, and what is needed to reproduce the run.

function drawFailures(data) {
  const rows = data.failures ?? [];
  if (!rows.length) return el("p", { class: "note" }, "No call failed for good.");
  return table({ caption: "Failed calls", kind: "plain", header: ["kind", "operator", "server", "calls"],
    rows: rows.map((row) => [row.kind, row.operator ?? "–", row.server ?? "–", { text: fixed(row.count, 0), value: row.count }]) });
}

function drawInvalid(data) {
  const rows = (data.invalid_by_length ?? []).filter((row) => row && typeof row === "object");
  if (!rows.length) return null;
  const header = Object.keys(rows[0]);
  return el("div", { class: "block" }, el("h4", null, "Invalid steps by length of question, in characters"),
    table({ caption: "Invalid steps by length of question", kind: "plain", header: header.map((name) => name.replaceAll("_", " ")),
      rows: rows.map((row) => header.map((name) => (isNumber(row[name]) ? { text: compact(row[name]), value: row[name] } : Array.isArray(row[name]) ? row[name].join(" to ") : row[name]))) }));
}

function measure({ value, unit }) {
  if (!isNumber(value)) return value === null || value === undefined ? "–" : String(value);
  if (unit === "s") return seconds(value);
  if (unit === "share") return `${percent(value)} %`;
  return [Number.isInteger(value) ? fixed(value, 0) : compact(value), unit && unit !== "1" ? ` ${unit}` : ""].join("");
}

function drawCalls(run) {
  const data = section(run, "calls");
  if (!data) return null;
  const price = data.price && typeof data.price === "object" ? data.price : null;
  return [
    table({ caption: "Calls", kind: "plain facts", header: ["figure", "value", "meaning"],
      rows: (data.rows ?? []).map((row) => [row.name, { text: measure(row), value: row.value }, row.meaning ?? ""]) }),
    price && el("div", { class: "block" }, el("h4", null, "Cost"), table({ caption: "Cost", kind: "plain", header: ["cost of", "value"],
      rows: Object.entries(price).filter(([, value]) => value === null || typeof value !== "object").map(([name, value]) => [name, { text: isNumber(value) ? compact(value) : String(value), value }]) })),
    el("div", { class: "block" }, el("h4", null, "Failures"), drawFailures(data)),
    drawInvalid(data),
  ];
}

perRun("calls", ["calls"], drawCalls, { empty: "No calls recorded yet." });

const callCharts = hostOf("calls").insertAdjacentElement("afterend", el("div", { class: "charts" }));
view(["metrics", "learning", "answer"], () => replace(callCharts, chartsOfRuns(true).map((each) => learningChart(each, []))));

function entries(title, object, open) {
  const rows = Object.entries(object ?? {});
  if (!rows.length) return null;
  const text = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
  return el("details", { open: open || null }, el("summary", { "data-focus": `d:${title}` }, `${title} (${rows.length})`),
    table({ caption: title, kind: "plain flags", header: ["name", "value"], rows: rows.map(([name, value]) => [name, text(value)]) }));
}

function drawReproduce(run) {
  const data = section(run, "reproduce");
  if (!data) return null;
  const short = { started: data.started, commit: data.commit, "dataset sha256": data.dataset_sha256 };
  const resumed = data.resumed?.length ? { resumed: data.resumed.map((each) => (typeof each === "object" ? Object.values(each).join(" ") : each)).join(", ") } : {};
  return [
    el("div", { class: "command" }, el("pre", { tabindex: "0", "aria-label": "Command line" }, el("code", null, data.command_line ?? "not recorded")),
      copyButton("Copy", data.command_line ?? "")),
    entries("Run", Object.fromEntries(Object.entries({ ...short, ...resumed }).filter(([, value]) => value)), true),
    entries("Versions", data.versions), typeof data.hardware === "object" ? entries("Hardware", data.hardware) : entries("Hardware", data.hardware && { machine: data.hardware }),
    entries("Configuration", data.flags),
  ];
}

perRun("reproduce", ["reproduce"], drawReproduce, { empty: "No configuration recorded." });
