// What the messages said so far. A message replaces a section or appends rows; the parts of the page it touches are
// drawn once in the next animation frame.

const MOST_FOUND = 64; // terms of a search that are remembered
const runs = []; // run -> { index, sections, metrics, texts, lower, questions, transcripts }
const store = { pairs: null, views: [], dirty: new Set(), waiting: false };

function runAt(index) {
  runs[index] ??= {
    index, sections: {}, metrics: { steps: [], wall_s: [], columns: {} }, texts: [], lower: [], found: new Map(), questions: [],
    transcripts: emptyTranscripts(), version: 0,
  };
  return runs[index];
}

const COLUMNS = ["env", "step", "episode", "id", "q", "op", "rewrite", "form", "answer", "baseline", "score", "reward", "calls",
  "valid", "error", "parts"];
const emptyTranscripts = () => ({ ...Object.fromEntries(COLUMNS.map((name) => [name, []])), episodes: [], byKey: new Map() });
const knownRuns = () => runs.filter(Boolean);
const section = (run, name) => run.sections[name] ?? null;
const runName = (run) => section(run, "answer")?.name || `run ${run.index + 1}`;

// The name of a run among several: with its folder where the names are equal (two seeds of one configuration).
function runLabel(run) {
  const name = runName(run);
  if (knownRuns().filter((other) => runName(other) === name).length < 2) return name;
  return String(section(run, "answer")?.folder ?? run.index + 1).split(/[\\/]/).filter(Boolean).pop();
}

const runLetter = (run) => String.fromCharCode(65 + (run.index % 26));

function apply(message) {
  const handler = HANDLERS[message.kind];
  if (!handler) return; // of a newer version
  touch(handler(message.run < 0 ? null : runAt(message.run ?? 0), message));
}

const HANDLERS = {
  section(run, { name, data }) {
    if (run) run.sections[name] = data;
    else store[name] = data;
    return name;
  },
  reset(run) {
    runs[run.index] = undefined;
    runAt(run.index).version = run.version + 1;
    return null; // everything
  },
  metrics(run, message) {
    if (message.reset) run.metrics = { steps: [], wall_s: [], columns: {} };
    const { metrics } = run;
    const before = metrics.steps.length;
    append(metrics.steps, message.steps);
    append(metrics.wall_s, message.wall_s ?? message.steps.map(() => null));
    for (const [key, values] of Object.entries(message.columns)) {
      const column = (metrics.columns[key] ??= []);
      while (column.length < before) column.push(null);
      append(column, values);
    }
    for (const column of Object.values(metrics.columns)) while (column.length < metrics.steps.length) column.push(null);
    return "metrics";
  },
  texts(run, { start, items }) {
    run.texts.length = Math.min(run.texts.length, start);
    run.lower.length = Math.min(run.lower.length, start);
    run.found.clear();
    append(run.texts, items);
    return "texts";
  },
  questions(run, { reset, rows }) {
    if (reset) run.questions = [];
    append(run.questions, rows);
    run.version += 1;
    return "questions";
  },
  transcripts(run, { reset, columns }) {
    if (reset) run.transcripts = emptyTranscripts();
    const { transcripts } = run;
    const before = transcripts.env.length;
    for (const name of COLUMNS) append(transcripts[name], columns[name] ?? columns.env.map(() => null));
    indexEpisodes(run, before);
    return "transcripts";
  },
};

function append(list, items) {
  for (const item of items) list.push(item);
}

// An episode is the rows of one environment with one number, in the order of the file.
function indexEpisodes(run, from) {
  const { transcripts } = run;
  for (let row = from; row < transcripts.env.length; row += 1) {
    const key = `${transcripts.env[row]}.${transcripts.episode[row]}`;
    let episode = transcripts.byKey.get(key);
    if (!episode) {
      episode = { run, key: `${run.index}.${key}`, order: transcripts.episodes.length, rows: [] };
      transcripts.byKey.set(key, episode);
      transcripts.episodes.push(episode);
    }
    episode.rows.push(row);
    episode.cache = null;
  }
}

const textOf = (run, number) => (isNumber(number) && number >= 0 ? run.texts[number] ?? "" : "");

// Which texts of a run contain a term (lower case): one byte for each text. While a word is typed, only the texts with
// its beginning are read again.
function textsWith(run, term) {
  const { texts, lower, found } = run;
  if (lower.length !== texts.length) found.clear();
  lowerTexts(run, texts.length);
  if (found.has(term)) return found.get(term);
  let size = term.length - 1;
  while (size > 0 && !found.has(term.slice(0, size))) size -= 1;
  const before = size > 0 ? found.get(term.slice(0, size)) : null;
  const mask = new Uint8Array(texts.length);
  for (let index = 0; index < texts.length; index += 1) {
    if ((!before || before[index]) && lower[index].includes(term)) mask[index] = 1;
  }
  if (found.size >= MOST_FOUND) found.clear();
  found.set(term, mask);
  return mask;
}

function lowerTexts(run, end) {
  const { texts, lower } = run;
  while (lower.length < Math.min(end, texts.length)) lower.push(texts[lower.length].toLowerCase());
}

// Register a part of the page: which messages it depends on, and how it is drawn.
function view(names, draw) {
  store.views.push({ names, draw });
}

function touch(name) {
  store.dirty.add(name);
  if (store.waiting) return;
  store.waiting = true;
  requestAnimationFrame(() => {
    store.waiting = false;
    drawDirty();
  });
}

function drawDirty() {
  const { dirty } = store;
  store.dirty = new Set();
  if (knownRuns().length) document.getElementById("loading")?.remove();
  for (const { names, draw } of store.views) if (dirty.has(null) || names.some((name) => dirty.has(name))) draw();
}
