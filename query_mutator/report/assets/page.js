// Search, filters, sorting and opening of questions; theme, copies and CSV. All else is in the page as it is.

const announce = (text) => { document.getElementById("announce").textContent = text; };

// Return the items of a block: JSON, compressed, as base64.
async function unpack(block) {
  const bytes = Uint8Array.from(atob(block.textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const GOOD = ["right", "kept"];
const MINUS = "−";
const signed = (value) => `${value > 0 ? "+" : ""}${value.toFixed(2)}`.replace("-", MINUS);

// How a question went from one side to another.
function changeOf({ outcomes }, { from, to }) {
  const both = [outcomes[from], outcomes[to]];
  if (both.some((outcome) => outcome === "missing" || outcome === "unscored")) return "unscored";
  const [before, after] = both.map((outcome) => GOOD.includes(outcome));
  if (before !== after) return after ? "gained" : "lost";
  return after ? "same right" : "same wrong";
}

// A table of questions or episodes: `facts` are what filters compare, `details` the HTML of what was said.
class Browser {
  constructor(node) {
    this.node = node;
    this.rows = [...node.querySelectorAll("tbody tr")];
    this.places = new Map(this.rows.map((row, place) => [row, place]));
    this.selects = [...node.querySelectorAll("[data-filter]")];
    this.search = node.querySelector("[type=search]");
    this.heads = [...node.querySelectorAll("thead th")];
    this.terms = [];
    this.search.addEventListener("input", () => this.find());
    for (const each of this.selects) each.addEventListener("change", () => this.compare());
    this.heads.forEach((head, column) => head.addEventListener("click", () => this.sort(head, column)));
    node.querySelector(".clear").addEventListener("click", () => this.clear());
    node.querySelector("tbody").addEventListener("click", (event) => {
      if (event.target.closest(".opener")) this.toggle(event.target.closest("tr"));
    });
    node.addEventListener("keydown", (event) => this.key(event));
    this.ready = this.read();
  }

  async read() {
    const [facts, ...blocks] = this.node.querySelectorAll("script");
    this.facts = await unpack(facts);
    this.compare();
    this.details = (await Promise.all(blocks.map(unpack))).flat();
  }

  // The texts of each row, in lower case; made when the first word is searched.
  texts() {
    const ids = [...this.places.keys()].map((row) => row.dataset.id);
    this.lower ??= this.details.map((html, place) => {
      const holder = document.createElement("template");
      holder.innerHTML = html;
      const said = [...holder.content.querySelectorAll("[dir=auto]")].map((each) => each.textContent);
      return [ids[place], ...said].join("\n").toLowerCase();
    });
    return this.lower;
  }

  async find() {
    await this.ready;
    this.terms = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.show(true);
  }

  get sides() {
    const value = (name) => Number(this.selects.find((each) => each.dataset.filter === name)?.value);
    return { from: value("from"), to: value("to") };
  }

  // Work out what depends on the two sides: the last three columns, and what the filters compare.
  compare() {
    const { sides } = this;
    for (const row of this.facts?.[0]?.outcomes ? this.rows : []) {
      const facts = this.factsOf(row);
      const gain = facts.scores[sides.to] - facts.scores[sides.from];
      const known = facts.scores[sides.to] !== null && facts.scores[sides.from] !== null;
      Object.assign(facts, { change: changeOf(facts, sides), outcome: facts.outcomes[sides.to], operator: facts.operators[sides.to] });
      const [change, score, calls] = [...row.cells].slice(-3);
      change.textContent = facts.change;
      change.className = `w ${facts.change}`;
      score.textContent = known ? signed(gain) : "–";
      score.dataset.value = known ? gain : "";
      calls.textContent = calls.dataset.value = facts.calls[sides.to] ?? "";
    }
    for (const head of this.heads.filter(({ dataset }) => dataset.side)) {
      const other = ![sides.from, sides.to].includes(Number(head.dataset.side));
      const column = this.node.querySelectorAll("col")[head.cellIndex];
      for (const each of [head, column, ...this.rows.map((row) => row.cells[head.cellIndex])]) each.classList.toggle("other", other);
    }
    this.show(this.facts !== undefined);
  }

  factsOf(row) {
    return this.facts[this.places.get(row)];
  }

  passes(row) {
    const facts = this.factsOf(row);
    const chosen = this.selects.filter(({ dataset, value }) => value && !["from", "to"].includes(dataset.filter));
    if (!chosen.every(({ dataset, value }) => [facts[dataset.filter]].flat().includes(value))) return false;
    if (!this.terms.length) return true;
    const text = `${this.texts()[this.places.get(row)]}\n${[facts.tag ?? []].flat().join("\n").toLowerCase()}`;
    return this.terms.every((term) => text.includes(term));
  }

  show(say) {
    if (!this.facts) return;
    let count = 0;
    for (const row of this.rows) {
      row.hidden = !this.passes(row);
      if (row.hidden) this.toggle(row, false);
      else count += 1;
    }
    const number = (value) => value.toLocaleString("en-US");
    const noun = `${this.node.dataset.noun}${this.rows.length === 1 ? "" : "s"}`;
    const text = count === this.rows.length ? `${number(count)} ${noun}` : `${number(count)} of ${number(this.rows.length)} ${noun}`;
    const status = this.node.querySelector(".count");
    if (say || status.textContent !== text) status.textContent = text;
  }

  clear() {
    this.search.value = "";
    this.terms = [];
    for (const each of this.selects) if (!["from", "to"].includes(each.dataset.filter)) each.value = "";
    this.show(true);
  }

  sort(head, column) {
    const next = { none: "ascending", ascending: "descending", descending: "none" }[head.ariaSort];
    for (const each of this.heads) each.ariaSort = each === head ? next : "none";
    const sign = next === "descending" ? -1 : 1;
    const valueOf = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent.toLowerCase() : cell.dataset.value === "" ? null : Number(cell.dataset.value);
    };
    const order = this.rows.map((row) => ({ row, place: this.places.get(row), value: next === "none" ? null : valueOf(row) }));
    order.sort((one, other) => (one.value === null) - (other.value === null)
      || (one.value < other.value ? -sign : one.value > other.value ? sign : 0) || one.place - other.place);
    this.rows = order.map(({ row }) => row);
    const body = this.node.querySelector("tbody");
    for (const row of this.rows) {
      const open = row.nextElementSibling?.matches(".details") ? row.nextElementSibling : null;
      body.append(row, ...(open ? [open] : []));
    }
    this.node.querySelector(".viewport").scrollTop = 0;
  }

  async toggle(row, open = !row.nextElementSibling?.matches(".details")) {
    const opener = row.querySelector(".opener");
    if (open === (opener.ariaExpanded === "true")) return;
    opener.ariaExpanded = String(open);
    row.classList.toggle("open", open);
    if (!open) return void row.nextElementSibling.remove();
    const line = document.createElement("tr");
    line.className = "details";
    const cell = line.insertCell();
    cell.colSpan = [...row.cells].filter((each) => each.offsetWidth).length;
    row.after(line);
    await this.ready;
    cell.innerHTML = `<div class="detail">${this.details[this.places.get(row)]}</div>`; // escaped by the templates
    const sides = [...cell.querySelectorAll(".side")];
    const shown = sides.find((side) => Number(side.dataset.side) === this.sides.to) ?? sides[0];
    if (shown) {
      sides[0].before(shown);
      shown.open = true;
    }
    if (this.node.id === "held-out") {
      try { history.replaceState(null, "", `#q=${encodeURIComponent(row.dataset.id)}`); } catch { /* not allowed for this page */ }
    }
  }

  key(event) {
    const row = event.target.closest("tbody tr");
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && row) {
      const main = row.matches(".details") ? row.previousElementSibling : row;
      this.toggle(main, false);
      main.querySelector(".opener").focus();
    } else if (step && event.target.matches(".opener")) {
      event.preventDefault();
      const shown = this.rows.filter((each) => !each.hidden);
      shown[shown.indexOf(row) + step]?.querySelector(".opener").focus();
    }
  }

  // Open the row of a question and bring it into view.
  async open(id) {
    const row = this.rows.find((each) => each.dataset.id === id);
    if (!row) return announce(`There is no question ${id}.`);
    if (row.hidden) this.clear();
    await this.toggle(row, true);
    document.getElementById("questions").scrollIntoView();
    const view = this.node.querySelector(".viewport");
    view.scrollTop += row.getBoundingClientRect().top - view.getBoundingClientRect().top - this.heads[0].offsetHeight;
    row.querySelector(".opener").focus({ preventScroll: true });
  }
}

async function openFromAddress() {
  const match = /^#q=(.+)$/.exec(location.hash);
  const browser = browsers.find(({ node }) => node.id === "held-out");
  if (!match || !browser) return;
  const mode = document.getElementById("show-held-out");
  if (mode) mode.checked = true;
  let id = match[1];
  try { id = decodeURIComponent(id); } catch { /* as it stands */ }
  await browser.open(id);
}

async function copy(text, source) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // file pages of some browsers have no clipboard
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    done = document.execCommand("copy");
    area.remove();
    source.focus();
  }
  const label = source.dataset.label ??= source.textContent;
  source.textContent = done ? "Copied" : "Not copied";
  announce(source.textContent);
  setTimeout(() => { source.textContent = label; }, 1500);
}

function saveTable(table, title) {
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [...table.rows].map((row) => [...row.cells].map((cell) => quoted(cell.dataset.value ?? cell.textContent)).join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
  link.download = `${title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (!button) return;
  const { copy: what, link, csv } = button.dataset;
  if (what) copy(button.closest(".detail, .command").querySelector(what).textContent, button);
  if (link) copy(`${location.href.split("#")[0]}#q=${encodeURIComponent(link)}`, button);
  if (csv) saveTable(button.closest("details").querySelector("table"), csv);
});

function themeSwitch() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const node = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const say = () => {
    node.textContent = isDark() ? "Light" : "Dark";
    node.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colors`);
  };
  try { root.dataset.theme = localStorage.getItem("qm-theme") ?? ""; } catch { /* no storage for this page */ }
  node.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("qm-theme", root.dataset.theme); } catch { /* no storage for this page */ }
    say();
  });
  dark.addEventListener("change", say);
  say();
}

function markCurrentPart() {
  const links = new Map([...document.querySelectorAll(".top nav a")].map((link) => [link.hash.slice(1), link]));
  const inView = new Set();
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) inView[isIntersecting ? "add" : "delete"](target.id);
    const current = [...links.keys()].find((id) => inView.has(id));
    for (const [id, link] of current ? links : []) link.toggleAttribute("aria-current", id === current);
  }, { rootMargin: "-20% 0px -75% 0px" });
  for (const part of document.querySelectorAll("main > section")) seen.observe(part);
}

themeSwitch();
markCurrentPart();
const browsers = [...document.querySelectorAll(".browser")].map((node) => new Browser(node));
addEventListener("hashchange", openFromAddress);
window.QM = { ready: Promise.all(browsers.map(({ ready }) => ready)).then(openFromAddress) };
