// Part 6: search, filters, sorting and the switch between held-out questions and training.

// `wanted` is the kind of rows that was asked for; what is there so far is shown until they have arrived.
const browser = { mode: "questions", wanted: "questions", search: "", sort: { questions: {}, episodes: {} }, filters: {}, sides: null, table: null, all: [] };

const select = (name, label, options, chosen) => el("label", { class: "field" }, el("span", null, label),
  el("select", { "data-filter": name, "data-focus": `f:${name}`, onchange: (event) => setFilter(name, event.target.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text))));

function setFilter(name, value) {
  if (name === "from" || name === "to") {
    browser.sides[name] = value;
    browser.chosen = true;
    browser.table.setColumns(columnsNow());
  } else browser.filters[name] = value;
  showRows(true);
}

// The policy against the original question; with several runs the last run's policy against the first one's.
function defaultSides() {
  const sides = allSides();
  const known = knownRuns();
  const pick = (run, ...names) => names.map((name) => sideKey(run, name)).find((side) => sides.includes(side)) ?? sides.find((side) => side.startsWith(`${run.index}:`));
  const last = known.findLast((run) => run.questions.length) ?? known[0];
  const first = known.find((run) => run.questions.length) ?? known[0];
  return { from: first === last ? pick(first, "identity") : pick(first, "policy"), to: pick(last, "policy", "plan", "best_plan") };
}

const columnsNow = () => (browser.mode === "questions" ? questionColumns(browser.sides) : episodeColumns());

const ANY = ["", "any"];
const options = (values) => [ANY, ...values.map((value) => [value, value])];

function filterFields() {
  const chosen = browser.filters;
  if (browser.mode === "episodes") {
    const operators = knownRuns().flatMap((run) => section(run, "policy")?.operators ?? []);
    return [select("operator", "Operator", options([...new Set(operators)]), chosen.operator), select("episode", "Outcome", options(EPISODE_OUTCOMES), chosen.episode)];
  }
  const sides = allSides().map((side) => [side, sideName(side)]);
  const questions = knownRuns().flatMap((run) => run.questions);
  const tags = [...new Set(questions.flatMap((question) => question.tags ?? []))].sort();
  const used = [...new Set(questions.flatMap((question) => Object.values(question.methods).flatMap((result) => result.steps ?? [])))].sort();
  const sets = [...new Set(questions.map((question) => question.set))];
  return [
    select("to", "Compare", sides, browser.sides.to), select("from", "with", sides, browser.sides.from),
    select("change", "Change", options(["gained", "lost", "same right", "same wrong", "unscored"]), chosen.change),
    select("outcome", "Outcome", [ANY, ...Object.entries(OUTCOMES)], chosen.outcome),
    select("operator", "Operator", options(used), chosen.operator), select("tag", "Tag", options(tags), chosen.tag),
    sets.length > 1 ? select("set", "Set", [ANY, ["test", "held out"], ["guard", "guard"]], chosen.set) : null,
  ];
}

function questionPasses(row) {
  const { change, outcome, operator, tag, set } = browser.filters;
  const { sides } = browser;
  return (!set || row.set === set) && (!tag || row.tags.includes(tag)) && (!change || changeOf(row, sides) === change)
    && (!outcome || outcomeIn(row, sides.to) === outcome) && (!operator || (resultOf(row, sides.to)?.steps ?? []).includes(operator));
}

function episodePasses(row) {
  const { operator, episode } = browser.filters;
  if (!operator && !episode) return true;
  const facts = episodeFacts(row);
  return (!operator || facts.operators.includes(operator)) && (!episode || facts.outcome === episode);
}

// A row is found if each word of the search is in one of its texts, its id or a tag.
function searchTest(search) {
  const terms = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (!terms.length) return () => true;
  const masks = new Map(knownRuns().map((run) => [run, terms.map((term) => textsWith(run, term))]));
  if (browser.mode === "episodes") {
    return (row) => masks.get(row.run).every((mask) => episodeFacts(row).numbers.some((number) => mask[number] === 1));
  }
  return (row) => terms.every((term, place) => row.id.toLowerCase().includes(term) || row.tags.some((tag) => tag.toLowerCase().includes(term))
    || [...questionTexts(row)].some(({ run, numbers }) => { const mask = masks.get(run)[place]; return numbers.some((number) => mask[number] === 1); }));
}

function sorted(rows, { key, down }) {
  const column = columnsNow().find((each) => each.key === key);
  if (!column) return rows;
  const sign = down ? -1 : 1;
  const missing = (value) => value === undefined || value === null || Number.isNaN(value);
  return rows.map((row, place) => ({ row, place, value: column.value(row) })).sort((one, other) => {
    if (missing(one.value) || missing(other.value)) return missing(one.value) - missing(other.value) || one.place - other.place;
    return (one.value < other.value ? -sign : one.value > other.value ? sign : 0) || one.place - other.place;
  }).map(({ row }) => row);
}

function showRows(say) {
  const passes = browser.mode === "questions" ? questionPasses : episodePasses;
  const found = searchTest(browser.search);
  const rows = sorted(browser.all.filter((row) => passes(row) && found(row)), browser.sort[browser.mode]);
  browser.table.setRows(rows);
  const noun = browser.mode === "questions" ? "question" : "episode";
  const text = rows.length === browser.all.length ? plural(rows.length, noun) : `${fixed(rows.length, 0)} of ${plural(browser.all.length, noun)}`;
  document.getElementById("row-count").textContent = text;
  if (say) announce(text);
}

function sortBy(key) {
  const { key: old, down } = browser.sort[browser.mode];
  browser.sort[browser.mode] = old !== key ? { key, down: false } : down ? {} : { key, down: true };
  browser.table.setSort(browser.sort[browser.mode]);
  showRows(false);
  browser.table.node.scrollTop = 0;
}

function clearFilters() {
  browser.filters = {};
  browser.search = "";
  document.getElementById("search").value = "";
  drawBrowser();
}

function setMode(mode) {
  browser.wanted = mode;
  if (browser.mode === mode) return;
  browser.mode = mode;
  browser.table = null;
  browser.filters = {};
  drawBrowser();
}

function buildBrowser(host) {
  const search = el("input", { type: "search", id: "search", placeholder: "Search questions, rewrites, answers …", autocomplete: "off", spellcheck: "false", "aria-label": "Search questions, rewrites and answers",
    oninput: (event) => { browser.search = event.target.value; showRows(true); } });
  host.replaceChildren(
    el("div", { class: "modes", role: "group", "aria-label": "Rows" }, [["questions", "Held-out questions"], ["episodes", "Training episodes"]].map(([mode, name]) =>
      el("button", { type: "button", class: "chip", "data-mode": mode, onclick: () => setMode(mode) }, name))),
    el("div", { class: "search" }, search, el("span", { id: "row-count", class: "note" }), button("Clear", clearFilters, { id: "clear" })),
    el("div", { id: "filters", class: "filters" }), el("div", { id: "rows" }));
}

function drawBrowser() {
  const host = hostOf("questions");
  const has = { questions: knownRuns().some((run) => run.questions.length), episodes: knownRuns().some((run) => run.transcripts.episodes.length) };
  if (!has.questions && !has.episodes) return void replace(host, el("p", { class: "note" }, store.complete ? "No rows recorded yet." : "Reading …"));
  const mode = has[browser.wanted] ? browser.wanted : has.questions ? "questions" : "episodes";
  if (mode !== browser.mode) Object.assign(browser, { mode, table: null, filters: {} });
  if (!document.getElementById("search")) buildBrowser(host);
  for (const node of host.querySelectorAll("[data-mode]")) {
    node.setAttribute("aria-pressed", String(node.dataset.mode === browser.mode));
    node.disabled = !has[node.dataset.mode];
  }
  const sides = allSides();
  const known = browser.sides && sides.includes(browser.sides.from) && sides.includes(browser.sides.to);
  if (!browser.chosen || !known) browser.sides = has.questions ? defaultSides() : null;
  browser.all = browser.mode === "questions" ? questionRows() : episodeRows();
  replace(document.getElementById("filters"), filterFields());
  if (!browser.table) {
    browser.table = new RowTable({
      label: browser.mode === "questions" ? "Held-out questions" : "Training episodes", columns: columnsNow(), rowHeight: 56, onSort: sortBy, onOpen: rememberRow,
      detail: (row) => (browser.mode === "questions" ? questionDetail(row, browser.sides) : episodeDetail(row)),
    });
    browser.table.setSort(browser.sort[browser.mode]);
    document.getElementById("rows").replaceChildren(browser.table.node);
  }
  showRows(false);
}

// The address names the open question, so that it can be sent to someone.
function rememberRow(key, open) {
  if (browser.mode !== "questions" || !open) return;
  const row = browser.all.find((each) => each.key === key);
  try { history.replaceState(null, "", `#q=${encodeURIComponent(row.id)}`); } catch { /* not allowed for this page */ }
}

function openFromAddress() {
  const match = /^#q=(.+)$/.exec(location.hash);
  if (!match || !store.complete) return;
  let id = match[1];
  try { id = decodeURIComponent(id); } catch { /* as it stands */ }
  if (browser.mode !== "questions") setMode("questions");
  drawBrowser();
  const row = browser.all.find((each) => each.id === id);
  if (!row) return announce(`There is no question ${id}.`);
  if (!browser.table.places.has(row.key)) clearFilters();
  browser.table.toggle(row.key, true);
  document.getElementById("questions").scrollIntoView();
  browser.table.show(row.key);
}

view(["questions", "transcripts", "texts"], drawBrowser);
