// A live page: applies what `qm watch` sends, and says whether it is connected. A hidden page holds no connection,
// because a browser opens only six to one address.

const liveLine = el("p", { id: "live", role: "status" });
const RECONNECT_MS = 3000;
let liveSource = null;
let lastEvent = ""; // the id of the last event received
let hasCaughtUp = false;
let received = window.QM.ready; // messages are applied in the order in which they came

function showLive(state, text) {
  liveLine.dataset.state = state;
  liveLine.textContent = text;
}

async function receive(data) {
  const message = await unpack(data);
  if (message.kind === "section" && message.name === "live") showLive("open", message.data.status || "Live");
  else window.QM.apply(message);
}

// Once everything that was there before has arrived, open the question that the address names.
function caughtUp() {
  if (hasCaughtUp) return;
  hasCaughtUp = true;
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
