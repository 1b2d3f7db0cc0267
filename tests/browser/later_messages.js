// Apply messages as a live page gets them, and wait until they are drawn.
() => {
  QM.apply({kind: "metrics", run: 0, reset: false, steps: [600], wall_s: [9], columns: {"losses/entropy": [0.5], "new/key": [1]}});
  QM.apply({kind: "texts", run: 0, start: 100000, items: []});
  QM.apply({kind: "transcripts", run: 0, reset: false, columns: {env: [5], step: [0], episode: [0], id: [0], q: [0], op: [0],
    rewrite: [0], answer: [-1], baseline: [null], score: [0], reward: [0], calls: [1], valid: [true], error: [-1], parts: [null]}});
  QM.apply({kind: "of a later version", run: 0});
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}
