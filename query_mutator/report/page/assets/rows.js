// A table of many rows: only those in view are in the document. Open rows have a second row with their details.

// Columns that a narrow screen leaves out; the details of a row have them.
const HIDDEN = [
  { query: matchMedia("(max-width: 900px)"), names: ["other", "t"] },
  { query: matchMedia("(max-width: 640px)"), names: ["n", "w", "p"] },
];

class RowTable {
  // columns: { key, name, title, cell(row), sortable, class }; detail(row) -> nodes
  constructor({ label, columns, detail, rowHeight, onSort, onOpen }) {
    Object.assign(this, { label, detail, rowHeight, onSort, onOpen, columns: [], rows: [], nodes: new Map(), open: new Map(), places: new Map() });
    this.before = gap();
    this.after = gap();
    this.head = el("tr", { "aria-rowindex": "1" });
    this.body = el("tbody", null, this.before, this.after);
    this.columnList = el("colgroup");
    this.table = el("table", { class: "rows" }, el("caption", { class: "hidden" }, label), this.columnList, el("thead", null, this.head), this.body);
    this.node = el("div", { class: "viewport", tabindex: "0", role: "region", "aria-label": label, onscroll: () => this.draw(), onkeydown: (event) => this.key(event) }, this.table);
    this.sizes = new ResizeObserver((entries) => this.measure(entries));
    new ResizeObserver(() => this.draw()).observe(this.node);
    this.setColumns(columns);
    for (const { query } of HIDDEN) query.addEventListener("change", () => { this.setColumns(this.offered); this.draw(); });
  }

  setColumns(columns) {
    this.offered = columns;
    this.columns = columns = columns.filter(({ class: name }) => !HIDDEN.some(({ query, names }) => query.matches && name.split(" ").some((each) => names.includes(each))));
    this.columnList.replaceChildren(...columns.map((column) => el("col", { class: column.class })));
    this.nodes.forEach(({ main, extra }) => { main.remove(); extra?.remove(); });
    this.nodes.clear();
    this.setSort(this.sort ?? {});
  }

  setSort(sort) {
    this.sort = sort;
    const keep = this.head.contains(document.activeElement) ? document.activeElement.closest("th").dataset.column : null;
    this.head.replaceChildren(...this.columns.map((column) => {
      const direction = sort.key === column.key ? (sort.down ? "descending" : "ascending") : column.sortable === false ? null : "none";
      return el("th", { scope: "col", class: column.class, "data-column": column.key, "aria-sort": direction, title: column.title },
        column.sortable === false ? column.name : button([column.name, el("span", { class: "arrow", "aria-hidden": "true" }, direction === "ascending" ? "▲" : direction === "descending" ? "▼" : "")], () => this.onSort(column.key)));
    }));
    if (keep) this.head.querySelector(`[data-column="${CSS.escape(keep)}"] button`)?.focus({ preventScroll: true });
  }

  // Show these rows in this order; what is drawn for a row is kept.
  setRows(rows) {
    this.rows = rows;
    this.places = new Map(rows.map((row, place) => [row.key, place]));
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    for (const key of [...this.nodes.keys()]) if (!this.places.has(key)) this.drop(key);
    this.draw();
  }

  drop(key) {
    const drawn = this.nodes.get(key);
    if (!drawn) return;
    if (drawn.main.contains(document.activeElement) || drawn.extra?.contains(document.activeElement)) this.node.focus({ preventScroll: true });
    drawn.main.remove();
    drawn.extra?.remove();
    this.nodes.delete(key);
  }

  // Heights of open details, by place among the rows shown.
  extras() {
    return [...this.open].map(([key, height]) => [this.places.get(key), height]).filter(([place]) => place !== undefined).sort((one, other) => one[0] - other[0]);
  }

  top(place, extras = this.extras()) {
    return place * this.rowHeight + extras.reduce((sum, [at, height]) => (at < place ? sum + height : sum), 0);
  }

  placeAt(y, extras) {
    let shift = 0;
    for (const [place, height] of extras) {
      const start = place * this.rowHeight + shift;
      if (y < start + this.rowHeight) break;
      if (y < start + this.rowHeight + height) return place;
      shift += height;
    }
    return Math.max(0, Math.min(this.rows.length - 1, Math.floor((y - shift) / this.rowHeight)));
  }

  draw() {
    const extras = this.extras();
    const { scrollTop, clientHeight } = this.node;
    const first = Math.max(0, this.placeAt(scrollTop, extras) - 4);
    const last = Math.min(this.rows.length - 1, this.placeAt(scrollTop + (clientHeight || 700), extras) + 4);
    const wanted = this.rows.slice(first, last + 1);
    const keys = new Set(wanted.map((row) => row.key));
    for (const key of [...this.nodes.keys()]) if (!keys.has(key)) this.drop(key);
    let previous = this.before;
    wanted.forEach((row, index) => { previous = this.place(row, first + index, previous); });
    setGap(this.before, this.rows.length ? this.top(first, extras) : 0, this.columns.length);
    setGap(this.after, this.rows.length ? this.top(this.rows.length, extras) - this.top(last + 1, extras) : 0, this.columns.length);
  }

  place(row, index, previous) {
    let drawn = this.nodes.get(row.key);
    const focused = drawn?.main.contains(document.activeElement);
    if (!drawn || drawn.stale) drawn = this.make(row, drawn);
    drawn.main.setAttribute("aria-rowindex", index + 2);
    if (previous.nextSibling !== drawn.main) previous.after(drawn.main);
    if (focused && !drawn.main.contains(document.activeElement)) drawn.main.querySelector(".opener").focus({ preventScroll: true });
    if (!drawn.extra) return drawn.main;
    if (drawn.main.nextSibling !== drawn.extra) drawn.main.after(drawn.extra);
    return drawn.extra;
  }

  make(row, old) {
    const isOpen = this.open.has(row.key);
    const main = el("tr", { "data-key": row.key, class: isOpen ? "open" : null, style: { height: `${this.rowHeight}px` } }, this.columns.map((column, place) => (place === 0
      ? el("th", { scope: "row", class: column.class }, el("button", { type: "button", class: "opener", "aria-expanded": String(isOpen), onclick: () => this.toggle(row.key) }, column.cell(row)))
      : el("td", { class: column.class }, column.cell(row)))));
    let extra = null;
    if (isOpen) {
      const inner = el("div", { class: "detail" }, this.detail(row));
      extra = el("tr", { class: "details" }, el("td", { colspan: this.columns.length }, inner));
      inner.dataset.key = row.key;
      this.sizes.observe(inner);
    }
    old?.main.remove();
    old?.extra?.remove();
    const drawn = { main, extra };
    this.nodes.set(row.key, drawn);
    return drawn;
  }

  measure(entries) {
    let changed = false;
    for (const { target } of entries) {
      const height = target.closest("tr")?.getBoundingClientRect().height ?? 0;
      if (height && this.open.has(target.dataset.key) && Math.abs(this.open.get(target.dataset.key) - height) > 1) {
        this.open.set(target.dataset.key, height);
        changed = true;
      }
    }
    if (changed) this.draw();
  }

  toggle(key, open = !this.open.has(key)) {
    if (open === this.open.has(key)) return;
    if (open) this.open.set(key, 320); // until it is measured
    else this.open.delete(key);
    const drawn = this.nodes.get(key);
    if (drawn) drawn.stale = true;
    this.draw();
    this.onOpen?.(key, open);
  }

  // Bring a row into view and focus its button; false where the row is not shown.
  show(key) {
    const place = this.places.get(key);
    if (place === undefined) return false;
    this.node.scrollTop = this.top(place);
    this.draw();
    this.nodes.get(key)?.main.querySelector(".opener").focus({ preventScroll: true });
    return true;
  }

  key(event) {
    const line = event.target.closest("tr[data-key]");
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") {
      const key = line?.dataset.key ?? event.target.closest(".detail")?.dataset.key;
      if (key && this.open.has(key)) { this.toggle(key, false); this.show(key); }
    } else if (move && line && event.target.classList.contains("opener")) {
      event.preventDefault();
      this.focusPlace(this.places.get(line.dataset.key) + move);
    }
  }

  focusPlace(place) {
    const row = this.rows[place];
    if (!row) return;
    const start = this.top(place);
    const head = this.table.tHead.offsetHeight;
    const { scrollTop, clientHeight } = this.node;
    if (start < scrollTop) this.node.scrollTop = start;
    else if (start + this.rowHeight > scrollTop + clientHeight - head) this.node.scrollTop = start + this.rowHeight - clientHeight + head;
    this.draw();
    this.nodes.get(row.key)?.main.querySelector(".opener").focus({ preventScroll: true });
  }
}

const gap = () => el("tr", { class: "gap", "aria-hidden": "true" }, el("td"));

function setGap(line, height, columns) {
  line.firstChild.colSpan = columns;
  line.firstChild.style.height = `${height}px`;
  line.hidden = height <= 0;
}
