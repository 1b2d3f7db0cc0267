// A live page: applies what `qm watch` sends, and says whether it is connected. A hidden page holds no connection,
// because a browser opens only six to one address.

const liveLine = el("p", { id: "live", role: "status" });
const RECONNECT_MS = 3000;
let liveSource = null;
let lastEvent = ""; // the id of the last event received
let received = window.QM.ready; // messages are applied in the order in which they came

function showLive(state, text) {
  liveLine.dataset.state = state;
  liveLine.textContent = text;
}

async function receive(data) {
  const message = await decode({ textContent: data, remove() {} });
  if (message.kind === "section" && message.name === "live") showLive("open", message.data.status || "Live");
  else window.QM.apply(message);
}

function caughtUp() {
  if (store.complete) return;
  store.complete = true;
  openFromAddress();
}

function connect() {
  if (liveSource || document.hidden) return;
  liveSource = new EventSource(lastEvent ? `/events/${lastEvent}` : "/events");
  liveSource.addEventListener("open", () => showLive("open", "Live"));
  liveSource.addEventListener("caught-up", () => { received = received.then(caughtUp); });
  liveSource.addEventListener("restart", () => location.reload());
  liveSource.addEventListener("message", ({ data, lastEventId }) => {
    lastEvent = lastEventId;
    received = received.then(() => receive(data)).catch(fail);
  });
  liveSource.addEventListener("error", () => {
    showLive("lost", "Not connected: qm watch has stopped, or is busy. Trying again.");
    if (liveSource?.readyState !== EventSource.CLOSED) return; // the browser connects again by itself
    disconnect();
    setTimeout(connect, RECONNECT_MS);
  });
}

function disconnect() {
  liveSource?.close();
  liveSource = null;
}

document.getElementById("main").before(liveLine);
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
received.then(connect);
