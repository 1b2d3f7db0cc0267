// Start: theme and navigation, then the messages in this file. Small ones first; questions and transcripts follow
// after the first paint.

const BLOCK = 'script[type="application/json+gzip"]';
const LATE = ["texts", "questions", "transcripts"];

// Return the message of a block: JSON, compressed, as base64. The block leaves the page.
async function decode(block) {
  const text = atob(block.textContent.trim());
  block.remove();
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

async function readBlocks() {
  if (typeof DecompressionStream === "undefined") throw new Error("This browser is too old: it has no DecompressionStream.");
  const blocks = [...document.querySelectorAll(BLOCK)];
  for (const block of blocks.filter((each) => !LATE.includes(each.dataset.kind))) apply(await decode(block));
  drawViews();
  await painted();
  for (const block of blocks.filter((each) => LATE.includes(each.dataset.kind))) {
    apply(await decode(block));
    await pause();
  }
  store.complete = true;
  drawViews(...LATE);
  openFromAddress();
  prepareSearch();
}

// Prepare the texts for the search while the browser is idle, so that the first letter is as quick as the others.
async function prepareSearch() {
  for (const run of knownRuns()) {
    while (run.lower.length < run.texts.length) {
      lowerTexts(run, run.lower.length + 5000);
      await pause();
    }
  }
}

// Let the browser draw; in a background tab, where it does not draw, continue at once.
const painted = () => new Promise((done) => {
  if (document.hidden) setTimeout(done, 0);
  else requestAnimationFrame(() => setTimeout(done, 0));
});
const pause = () => new Promise((done) => setTimeout(done, 0));

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
  if (!root.dataset.theme) delete root.dataset.theme;
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
    for (const [id, link] of links) {
      if (id === current) link.setAttribute("aria-current", "true");
      else if (current) link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-20% 0px -75% 0px" });
  for (const part of document.querySelectorAll("main > section")) seen.observe(part);
}

function fail(error) {
  const node = document.getElementById("loading") ?? document.getElementById("main").insertAdjacentElement("afterbegin", el("p"));
  node.id = "failed";
  node.className = "warning";
  node.setAttribute("role", "alert");
  node.textContent = `The page could not be read. ${error.message}`;
  throw error;
}

themeSwitch();
markCurrentPart();
addEventListener("hashchange", openFromAddress);
const loaded = document.readyState === "loading"
  ? new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }))
  : Promise.resolve();
window.QM = { ready: loaded.then(readBlocks).catch(fail) };
