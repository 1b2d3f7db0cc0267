setInterval(async () => { // of a page that qm watch serves: load it again when its file, of this TAG, was written again
  const reply = await fetch(location.pathname, { method: "HEAD", cache: "no-store" }).catch(() => null);
  const tag = reply?.headers.get("ETag");
  if (tag && tag !== '"TAG"') location.reload();
}, 1000);
