// What the messages said: a message is a section of a run, or adds rows to it; parts of the page are drawn from that.

const MOST_FOUND = 64; // terms of a search that are remembered
const runs = []; // run -> { index, sections, metrics, texts, lower, questions, transcripts }
const store = { pairs: null, views: [] };

function runAt(index) {
  runs[index] ??= {
    index, sections: {}, metrics: { steps: [], wall_s: [], columns: {} }, texts: [], lower: [], found: new Map(), questions: [],
    transcripts: emptyTranscripts(),
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
  HANDLERS[message.kind]?.(message.run < 0 ? null : runAt(message.run ?? 0), message); // none: of a newer version
}

const HANDLERS = {
  section(run, { name, data }) {
    if (run) run.sections[name] = data;
    else store[name] = data;
  },
  metrics(run, { steps, wall_s, columns }) {
    run.metrics = { steps, wall_s, columns };
  },
  texts(run, { items }) {
    append(run.texts, items);
  },
  questions(run, { rows }) {
    append(run.questions, rows);
  },
  transcripts(run, { columns }) {
    const { transcripts } = run;
    const before = transcripts.env.length;
    for (const name of COLUMNS) append(transcripts[name], columns[name] ?? columns.env.map(() => null));
    indexEpisodes(run, before);
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
  }
}

const textOf = (run, number) => (isNumber(number) && number >= 0 ? run.texts[number] ?? "" : "");

// Which texts of a run contain a term (lower case): one byte for each text. While a word is typed, only the texts with
// its beginning are read again.
function textsWith(run, term) {
  const { texts, lower, found } = run;
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

// Register a part of the page: which sections and kinds of rows it depends on, and how it is drawn.
function view(names, draw) {
  store.views.push({ names, draw });
}

// Draw all parts, or those that depend on one of these names.
function drawViews(...changed) {
  if (knownRuns().length) document.getElementById("loading")?.remove();
  for (const { names, draw } of store.views) if (!changed.length || names.some((name) => changed.includes(name))) draw();
}
