// The way of one question step by step: operator, word-level difference, answer, parts of the score, what was submitted.

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const MOST_CELLS = 4e6; // of the table below; beyond it a text counts as replaced whole
const AS_IS = "as_is"; // the form in which an episode begins
const MOST_SHOWN = 20_000; // characters of an answer until the rest is asked for

// Word-level difference of two texts: [kind, text] with kind "same", "cut" or "new" (longest common subsequence).
function wordDiff(before, after) {
  const a = before.match(WORDS) ?? [];
  const b = after.match(WORDS) ?? [];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = lcs(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([["same", a.slice(0, start).join("")], ...middle, ["same", a.slice(a.length - end).join("")]]);
}

function lcs(a, b) {
  if (a.length * b.length > MOST_CELLS) return [["cut", a.join("")], ["new", b.join("")]];
  const wide = b.length + 1;
  const best = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      best[i * wide + j] = a[i] === b[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
    }
  }
  const out = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { out.push(["same", a[i]]); i += 1; j += 1; }
    else if (i < a.length && (j === b.length || best[(i + 1) * wide + j] >= best[i * wide + j + 1])) { out.push(["cut", a[i]]); i += 1; }
    else { out.push(["new", b[j]]); j += 1; }
  }
  return out;
}

// Join equal neighbours; white space between two changes belongs to them, so that a changed phrase reads as one.
function joined(pieces) {
  const out = [];
  let cut = "";
  let fresh = "";
  const flush = () => {
    if (cut) out.push(["cut", cut]);
    if (fresh) out.push(["new", fresh]);
    cut = fresh = "";
  };
  pieces.filter(([, text]) => text).forEach(([kind, text], place, all) => {
    if (kind === "cut") cut += text;
    else if (kind === "new") fresh += text;
    else if ((cut || fresh) && /^\s+$/.test(text) && all[place + 1]?.[0] !== "same" && place + 1 < all.length) { cut += text; fresh += text; }
    else { flush(); out.push(["same", text]); }
  });
  flush();
  return out;
}

const TAG_OF = { same: "span", cut: "del", new: "ins" };

function wording(before, after) {
  if (before === after) return el("p", { class: "wording same", dir: "auto" }, after);
  return el("p", { class: "wording", dir: "auto" }, wordDiff(before, after).map(([kind, text]) => el(TAG_OF[kind], null, text)));
}

function longText(text) {
  if (text.length <= MOST_SHOWN) return el("div", { class: "text", dir: "auto" }, text);
  const node = el("div", { class: "text", dir: "auto", tabindex: "0" }, text.slice(0, MOST_SHOWN), "…");
  const more = button(`Show all ${fixed(text.length, 0)} characters`, () => { node.textContent = text; more.remove(); });
  return [node, more];
}

function scoreParts(parts) {
  const rows = Object.entries(parts ?? {}).filter(([, value]) => isNumber(value));
  if (!rows.length) return null;
  return el("dl", { class: "parts", "aria-label": "Parts of the score" },
    rows.map(([name, value]) => el("div", null, el("dt", null, name.replaceAll("_", " ")), el("dd", { "data-value": value }, fixed(value, 2)))));
}

// attempt: { text, form, parts, submitted, why }
function attemptBlock({ text, form, parts, submitted, why, number, score, fit }) {
  return el("div", { class: submitted ? "attempt submitted" : "attempt" },
    el("div", { class: "attempt-head" }, el("span", null, [`Answer ${number}`, form && form !== AS_IS && `in the form ${form}`, isNumber(score) && `score ${fixed(score, 2)}`, isNumber(fit) && `fit ${fixed(fit, 2)}`].filter(Boolean).join(" · ")), submitted && el("span", { class: "pill right" }, "submitted"), submitted && why && el("span", { class: "why" }, why)),
    text ? longText(text) : el("p", { class: "note" }, "(empty)"), scoreParts(parts));
}

// steps: { operator, before, after, attempts, note }; `first` are answers before the first step
function wayList(first, steps) {
  const item = ({ operator, before, after, attempts, note }, place) => el("li", null,
    el("div", { class: "step-head" }, el("span", { class: "number" }, String(place + 1)),
      el("span", { class: "operator", style: { "--color": operatorColor(operator) } }, operator), note && el("span", { class: "note" }, note)),
    operator in CONTROLS && before === after ? null : wording(before, after), attempts.map(attemptBlock));
  return [first.map(attemptBlock), steps.length ? el("ol", { class: "way" }, steps.map(item)) : el("p", { class: "note" }, "No step.")];
}

// Match the answers to steps: the first step, in order, that asks this wording.
function evaluationWay(run, question, result) {
  const rewrites = (result.rewrites ?? []).map((text) => textOf(run, text));
  const asked = (result.asked ?? []).map((text) => textOf(run, text));
  const original = textOf(run, question.q);
  const steps = (result.steps ?? []).map((operator, place) => ({ operator, before: place ? rewrites[place - 1] : original, after: rewrites[place] ?? original, attempts: [] }));
  const first = [], stepForms = result.step_forms ?? [];
  let from = 0;
  asked.forEach((wordingAsked, number) => {
    const form = result.forms?.[number] ?? AS_IS;
    const attempt = {
      form,
      number: number + 1, text: textOf(run, result.answers?.[number]), parts: result.parts?.[number],
      submitted: result.submitted === number, why: result.why, score: result.scores?.[number], fit: result.fits?.[number],
    };
    const fits = (step, place) => place >= from && step.after === wordingAsked && (stepForms[place] ?? AS_IS) === form;
    let place = steps.findIndex((step, index) => fits(step, index) && (step.operator === "ask" || step.operator === "submit"));
    if (place < 0 && (wordingAsked !== original || form !== AS_IS)) place = steps.findIndex(fits);
    if (place < 0) return void (steps.length && from ? steps[from - 1].attempts : first).push(attempt);
    steps[place].attempts.push(attempt);
    from = place + 1;
  });
  return wayList(first, steps);
}

function episodeWay(run, episode) {
  const { transcripts } = run;
  let before = textOf(run, transcripts.q[episode.rows[0]]);
  let number = 0;
  const steps = episode.rows.map((row) => {
    const after = isNumber(transcripts.rewrite[row]) && transcripts.rewrite[row] >= 0 ? textOf(run, transcripts.rewrite[row]) : before;
    const answer = textOf(run, transcripts.answer[row]);
    const failed = transcripts.valid[row] === false || transcripts.valid[row] === 0;
    const note = failed ? `failed, left out of learning: ${textOf(run, transcripts.error[row]) || "no reply"}`
      : `reward ${signed(transcripts.reward[row], 3)} · score ${fixed(transcripts.score[row], 2)}`;
    const step = { operator: operatorName(run, transcripts.op[row]), before, after, note,
      attempts: answer ? [{ number: (number += 1), text: answer, form: textOf(run, transcripts.form[row]), parts: transcripts.parts[row] }] : [] };
    before = after;
    return step;
  });
  return wayList([], steps);
}

function operatorName(run, value) {
  return typeof value === "number" ? textOf(run, value) : value;
}
