// Return the texts of the page whose color differs too little from what is behind them.
() => {
  const paint = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = (color) => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = color; paint.fillRect(0, 0, 1, 1); return paint.getImageData(0, 0, 1, 1).data; };
  const luminance = (color) => [0, 1, 2].map((i) => color[i] / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((s, c, i) => s + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => { for (let n = node; n; n = n.parentElement) { const c = rgb(getComputedStyle(n).backgroundColor); if (c[3] === 255) return c; } return rgb("white"); };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    const style = getComputedStyle(node);
    if (!text || !node.checkVisibility() || node.disabled || node.closest("[aria-hidden=true]")) continue;
    const [a, b] = [luminance(rgb(node.closest("svg") ? style.fill : style.color)), luminance(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${node.tagName} ${node.className} ${ratio.toFixed(2)} ${node.textContent.slice(0, 30)}`);
  }
  return low;
}
