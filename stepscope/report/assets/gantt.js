"use strict";
// One step: its phases in loop order, and the device's span where there is one.

function gantt(run, figure, index) {
  const canvas = figure.querySelector("canvas");
  const finding = figure.querySelector(".finding");
  if (!known(index)) {
    nothing(canvas, 120, "No step to show.");
    finding.textContent = "No step to show.";
    return;
  }
  const bars = ganttBars(run, index), s = run.steps;
  const title = `${stepTitle(run, index)}: ${ms(s.wall[index])} ms, batch ${s.batch[index]}, ${words(s.verdicts[s.verdict[index]])}`;
  finding.textContent = `${title}.`;
  canvas.setAttribute("aria-label", `One step. ${title}. ${bars.map((b) => `${b.name} ${ms(b.ns)} ms`).join(", ")}`);
  const row = 21, { g, width } = surface(canvas, bars.length * row + 62);
  const area = { left: 84, right: width - 24, top: 14, bottom: 14 + bars.length * row };
  const high = Math.max(s.wall[index], ...bars.map((b) => b.from + b.ns)) / 1e6;
  const X = ganttAxis(g, area, Math.max(high, 1e-6));
  bars.forEach((bar, i) => {
    const y = area.top + i * row, x0 = X(bar.from / 1e6), x1 = Math.max(x0 + 1.5, X((bar.from + bar.ns) / 1e6));
    g.fillStyle = colour(bar.ink);
    g.fillRect(x0, y + 3, x1 - x0, row - 6);
    g.fillStyle = colour("ink");
    g.textBaseline = "middle";
    g.textAlign = "right";
    g.fillText(bar.name, area.left - 8, y + row / 2);
    const text = `${ms(bar.ns)} ms`, room = g.measureText(text).width + 12;
    const after = x1 + room < width, inside = !after && x1 - x0 > room;
    if (inside) g.fillStyle = colour("bg");
    g.textAlign = after ? "left" : "right";
    g.fillText(text, after ? x1 + 5 : inside ? x1 - 6 : x0 - 5, y + row / 2);
  });
}

function ganttAxis(g, area, high) {
  const X = scale({ low: 0, high }, area.left, area.right);
  const ticks = linearTicks(0, high, Math.max(2, (area.right - area.left) / 76));
  g.lineWidth = 1;
  g.strokeStyle = colour("grid");
  g.fillStyle = colour("dim");
  xAxis(g, area, { title: "time since the step began, ms" }, ticks, X);
  return X;
}

function ganttBars(run, index) {
  const s = run.steps, bars = [];
  let from = 0;
  for (const name of run.phases) {
    const ns = s.phases[name][index];
    if (!known(ns)) continue;
    if (ns) bars.push({ name, from, ns, ink: `p-${name}` });
    from += ns;
  }
  if (s.dev_begin && known(s.dev_begin[index]) && known(s.dev_end[index])) {
    const start = s.dev_begin[index] - s.begin[index];
    bars.push({ name: "device", from: Math.max(0, start), ns: s.dev_end[index] - s.dev_begin[index], ink: "dim" });
  }
  return bars;
}
