"use strict";
// The smaller figures. Each takes (run, figure) and draws into its canvas.

const HEIGHT = 300;
const KIND = { decode: ["r-0", ""], mixed: ["r-1", "square"], prefill: ["r-2", "ring"] };

const bounds = (values) => [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];

function stageOf(figure, height = HEIGHT, left = 56, right = 16) {
  const canvas = figure.querySelector("canvas");
  const { g, width } = surface(canvas, height);
  return { canvas, g, area: { left, right: width - right, top: 24, bottom: height - 46 } };
}

function roofline(run, figure) {
  const s = run.steps, canvas = figure.querySelector("canvas"), points = [];
  for (const i of run.working) {
    const bytes = (s.weight_bytes[i] || 0) + (s.kv_bytes[i] || 0);
    if (s.flops[i] && bytes && s.wall[i]) points.push([s.flops[i] / bytes, s.flops[i] / (s.wall[i] / 1e9), s.kinds[s.kind[i]], i]);
  }
  run.roof = points;
  if (!points.length) { nothing(canvas, 120, "No step has both FLOPs and bytes."); return; }
  const { g, area } = stageOf(figure);
  const [x0, x1] = bounds(points.map((p) => p[0])), [y0, y1] = bounds(points.map((p) => p[1]));
  const ridge = run.read_rate && run.gemm_rate ? run.gemm_rate / run.read_rate : x1;
  const xs = { log: true, low: Math.min(x0, ridge) / 3, high: Math.max(x1, ridge) * 1.8, title: "FLOPs per byte read", format: plain };
  const top = Math.max(y1, run.gemm_rate || 0, run.read_rate ? run.read_rate * Math.min(ridge, xs.high) : 0);
  const unit = top >= 1e13 ? [1e12, "TFLOP/s"] : [1e9, "GFLOP/s"];
  const ys = { log: true, low: y0 / 1.6 / unit[0], high: (top * 1.7) / unit[0], title: unit[1], format: plain };
  const box = plot(g, area, xs, ys);
  clipped(g, area, () => {
    for (const [x, y, kind] of points) dot(g, box.X(x), box.Y(y / unit[0]), kind);
    roof(g, box, run, xs, unit[0]);
  });
  legend(figure, Object.entries(KIND).filter(([k]) => points.some((p) => p[2] === k)).map(([k, [ink, shape]]) => [`${k} steps`, ink, shape || "round"]));
  nearest(canvas, points.map(([x, y, , i]) => [box.X(x), box.Y(y / unit[0]), i]), (i) => [stepTitle(run, i), stepLines(run, i)]);
}

function dot(g, x, y, kind) {
  g.fillStyle = g.strokeStyle = colourOf(kind);
  g.globalAlpha = 0.55;
  if (kind === "mixed") g.fillRect(x - 3, y - 3, 6, 6);
  else {
    g.beginPath();
    g.arc(x, y, kind === "prefill" ? 4 : 2.6, 0, 7);
    if (kind === "prefill") { g.lineWidth = 1.6; g.stroke(); } else g.fill();
  }
  g.globalAlpha = 1;
}

const inkCache = new Map();
function colourOf(kind) {
  if (!inkCache.has(kind)) inkCache.set(kind, colour((KIND[kind] || ["dim"])[0]));
  return inkCache.get(kind);
}

// Measured ceilings are solid; those of a model or a data sheet are dashed.
function roof(g, box, run, xs, unit) {
  const dash = run.stamp === "MEASURED" ? [] : [7, 4], ink = colour("ink");
  const flat = run.gemm_rate ? run.gemm_rate / unit : Infinity;
  if (run.read_rate) {
    const slope = run.read_rate / unit, end = Math.min(xs.high, flat / slope);
    line(g, [[box.X(xs.low), box.Y(slope * xs.low)], [box.X(end), box.Y(slope * end)]], ink, 1.8, dash);
    const at = Math.sqrt(xs.low * end), text = `${size(run.read_rate)}/s`;
    note(g, text, Math.max(box.left + 4, box.X(at) - g.measureText(text).width - 10), box.Y(slope * at) - 4, ink);
  }
  if (run.gemm_rate) {
    const from = run.read_rate ? Math.min(xs.high, run.gemm_rate / run.read_rate) : xs.low;
    line(g, [[box.X(from), box.Y(flat)], [box.right, box.Y(flat)]], ink, 1.8, dash);
    note(g, `${plain(flat)} ${unit === 1e9 ? "GFLOP/s" : "TFLOP/s"}`, box.right - 4, box.Y(flat) + 13, ink, "right");
  }
}

function batch(run, figure) {
  const points = run.batches, canvas = figure.querySelector("canvas");
  if (!points.length) { nothing(canvas, 120, "No decode-only steps."); return; }
  const { g, area } = stageOf(figure);
  const [low, high] = bounds(points.map((p) => p[0]));
  const top = Math.max(...points.map((p) => Math.max(p[4] ?? p[2], p[5] || 0, p[6] || 0))) / 1e6;
  const pad = Math.max(0.5, (high - low) * 0.04);
  const box = plot(g, area, { low: low - pad, high: high + pad, title: "batch: requests that decode together", format: (t) => (Number.isInteger(t) ? String(t) : "") },
    { low: 0, high: top * 1.08, title: "step time, ms" });
  const series = (k) => points.filter((p) => known(p[k])).map((p) => [box.X(p[0]), box.Y(p[k] / 1e6)]);
  const measured = colour("p-forward"), floor = colour("b-weights"), twin = colour("b-dispatch");
  for (const p of points) {
    g.strokeStyle = measured;
    rule(g, box.X(p[0]), box.Y((p[3] ?? p[2]) / 1e6), box.X(p[0]), box.Y((p[4] ?? p[2]) / 1e6));
  }
  line(g, series(2), measured, 1.5);
  for (const [x, y] of series(2)) { g.fillStyle = measured; g.beginPath(); g.arc(x, y, 3.2, 0, 7); g.fill(); }
  const lonely = (list) => (list.length === 1 ? [[list[0][0] - 20, list[0][1]], [list[0][0] + 20, list[0][1]]] : list);
  line(g, lonely(series(5)), floor, 2, run.stamp === "MEASURED" ? [] : [7, 4]);
  line(g, lonely(series(6)), twin, 2, [2, 3]);
  const drawn = [["decode step, p50", "p-forward", "round"]];
  drawn.push([series(5).length ? "bound" : "bound: n/a", "b-weights", "line"]);
  drawn.push([series(6).length ? "dispatch (twin)" : "dispatch: n/a", "b-dispatch", "dots"]);
  legend(figure, drawn);
  nearest(canvas, points.map((p, i) => [box.X(p[0]), box.Y(p[2] / 1e6), i]), (i) => {
    const p = points[i];
    return [`batch ${p[0]}`, [["p50", `${ms(p[2])} ms`], ["p10 to p90", `${ms(p[3])} to ${ms(p[4])} ms`], ["bound", known(p[5]) ? `${ms(p[5])} ms` : "n/a"], ["dispatch", known(p[6]) ? `${ms(p[6])} ms` : "n/a"], ["steps", count(p[1])]]];
  });
}

const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [1, 2]];

// CDF and tail of every run that has this run's stamp; the shown run is drawn last and widest.
function itl(run, figure) {
  const canvas = figure.querySelector("canvas");
  const peers = DATA.runs.filter((r) => r.stamp === run.stamp && r.gaps.length);
  if (!run.gaps.length) { nothing(canvas, 120, "No gaps between tokens."); return; }
  const { g, area } = stageOf(figure);
  const middle = area.left + (area.right - area.left) * 0.5;
  const body = { ...area, right: middle - 14 }, tail = { ...area, left: middle + 42 };
  const all = peers.flatMap((r) => [Math.max(r.gaps[0][0], 1), r.gaps[r.gaps.length - 1][0]]);
  const [low, high] = bounds(all), most = Math.max(...peers.map((r) => r.gap_count));
  const x = { log: true, low: (low / 1e6) * 0.95, high: Math.max((high / 1e6) * 1.05, (low / 1e6) * 1.1), format: plain };
  const left = plot(g, body, x, { low: 0, high: 100, title: "% of gaps at most" });
  const right = plot(g, tail, { ...x, title: "gap between tokens, ms" }, { log: true, low: Math.max(100 / most / 1.5, 1e-4), high: 100, title: "% of gaps longer", format: plain });
  for (const peer of [...peers.filter((r) => r !== run), run]) {
    const k = DATA.runs.indexOf(peer), ink = colour(`r-${k % 6}`), wide = peer === run ? 2.2 : 1.3;
    const at = peer.gaps.map(([ns, n]) => [ns / 1e6, n / peer.gap_count]);
    line(g, at.map(([v, share]) => [left.X(v), left.Y(share * 100)]), ink, wide, DASHES[k % 6]);
    const longer = at.filter(([, share]) => share < 1).map(([v, share]) => [right.X(v), right.Y((1 - share) * 100)]);
    clipped(g, tail, () => line(g, longer, ink, wide, DASHES[k % 6]));
  }
  const others = DATA.runs.length - peers.length;
  legend(figure, [...peers.map((r) => [r.label, `r-${DATA.runs.indexOf(r) % 6}`, DATA.runs.indexOf(r) % 6 ? "dash" : "line"]),
    ...(others > 0 ? [[`${others} of another stamp not drawn`, "line", ""]] : [])]);
}

function ttft(run, figure) {
  const t = run.ttft, n = t.id.length, canvas = figure.querySelector("canvas");
  if (!n) { nothing(canvas, 120, "No request reached its first token."); return; }
  const { g, area } = stageOf(figure);
  const total = t.queue.map((q, i) => q + t.prefill[i]);
  const columns = Math.min(n, Math.floor((area.right - area.left) / 3));
  const high = Math.max(bounds(total)[1] / 1e6, 1e-3);
  const box = plot(g, area, { low: 0, high: n, hide: true }, { low: 0, high: high * 1.05, title: "ms to the first token" });
  const queue = colour("neutral"), prefill = colour("p-forward"), hatch = stripes(g), spots = [];
  for (let c = 0; c < columns; c++) {
    const members = [];
    for (let i = Math.floor((c * n) / columns); i < Math.floor(((c + 1) * n) / columns); i++) members.push(i);
    members.sort((a, b) => total[a] - total[b]);
    const i = members[(members.length - 1) >> 1], longest = members[members.length - 1];
    const x0 = box.X((c * n) / columns), full = box.X(((c + 1) * n) / columns) - x0, wide = Math.min(40, full > 4 ? full - 1.5 : full);
    const from = x0 + (full - wide) / 2, yq = box.Y(t.queue[i] / 1e6), yt = box.Y(total[i] / 1e6);
    for (const fill of [queue, hatch]) { g.fillStyle = fill; g.fillRect(from, yq, wide, area.bottom - yq); }
    g.fillStyle = prefill;
    g.fillRect(from, yt, wide, yq - yt);
    if (longest !== i) { g.fillStyle = colour("dim"); g.fillRect(from + wide / 2, box.Y(total[longest] / 1e6), 1, yt - box.Y(total[longest] / 1e6)); }
    spots.push([from + wide / 2, yt, i]);
  }
  g.fillStyle = colour("dim");
  g.textBaseline = "top";
  g.textAlign = "right";
  g.fillText(`${count(n)} requests in order of arrival`, area.right, area.bottom + 8);
  legend(figure, [["queued", "neutral", "harm"], ["admission to first token", "p-forward"]]);
  nearest(canvas, spots, (i) => [`request ${t.id[i]}`, [["queued", `${ms(t.queue[i])} ms`], ["then", `${ms(t.prefill[i])} ms`], ["TTFT", `${ms(total[i])} ms`], ["prompt", `${count(t.prompt[i])} tokens`]]], true);
}

function traffic(run, figure) {
  const s = run.steps, canvas = figure.querySelector("canvas");
  const has = run.working.filter((i) => s.weight_bytes[i] || s.kv_bytes[i]);
  if (!has.length) { nothing(canvas, 120, "No step has byte counts."); return; }
  const { g, area } = stageOf(figure, 240);
  const low = s.begin[0], high = s.end[s.end.length - 1], pixels = Math.floor(area.right - area.left);
  const buckets = Array.from({ length: pixels }, () => []);
  for (const i of has) {
    const from = Math.floor(((s.begin[i] - low) / (high - low)) * pixels), to = Math.floor(((s.end[i] - low) / (high - low)) * pixels);
    for (let p = from; p <= Math.min(to, pixels - 1); p++) buckets[p].push(i);
  }
  const sum = (i) => (s.weight_bytes[i] || 0) + (s.kv_bytes[i] || 0);
  const shown = buckets.map((b) => b.sort((a, c) => sum(a) - sum(c))[(b.length - 1) >> 1]);
  const top = Math.max(...shown.filter(known).map(sum)), unit = top >= 1e9 ? [1e9, "GB"] : [1e6, "MB"];
  const box = plot(g, area, { low: low / 1e9, high: high / 1e9, title: "time since the start of the run, s" }, { low: 0, high: (top / unit[0]) * 1.06, title: `${unit[1]} per step` });
  const weights = colour("b-weights"), kv = colour("b-kv");
  shown.forEach((i, p) => {
    if (!known(i)) return;
    const yw = box.Y((s.weight_bytes[i] || 0) / unit[0]), yt = box.Y(sum(i) / unit[0]);
    g.fillStyle = weights;
    g.fillRect(area.left + p, yw, 1, area.bottom - yw);
    g.fillStyle = kv;
    g.fillRect(area.left + p, yt, 1, yw - yt - 1);
  });
  legend(figure, [["weights", "b-weights"], ["KV cache", "b-kv"]]);
  const spots = shown.map((i, p) => [area.left + p, known(i) ? box.Y(sum(i) / unit[0]) : 0, i]).filter((p) => known(p[2]));
  nearest(canvas, spots, (i) => [stepTitle(run, i), [["weights", size(s.weight_bytes[i])], ["KV", size(s.kv_bytes[i])], ["context", `${count(s.context_tokens[i])} tokens`]]], true);
}

// Shows a tip for the closest of [x, y, index]; only x counts where columns fill the height.
function nearest(canvas, spots, describe, byColumn = false) {
  canvas.onpointermove = (event) => {
    let best = null, least = byColumn ? 900 : 324;
    for (const [x, y, index] of spots) {
      const far = (x - event.offsetX) ** 2 + (byColumn ? 0 : (y - event.offsetY) ** 2);
      if (far < least) { least = far; best = index; }
    }
    if (best === null) hideTip(canvas);
    else showTip(canvas, event.offsetX, event.offsetY, ...describe(best));
  };
  canvas.onpointerleave = () => hideTip(canvas);
}

const FIGURES = { roofline, batch, itl, ttft, traffic };
