"use strict";
// Steps over time: phases of the median step per column, verdicts by time, and the scheduler.

const TIMELINE_HEIGHT = 400;

class Timeline {
  constructor(run, figure, onSelect) {
    this.run = run;
    this.figure = figure;
    this.canvas = figure.querySelector("canvas");
    this.onSelect = onSelect;
    this.pointer = null;
    this.fit();
    this.listen();
  }

  get extent() {
    const s = this.run.steps;
    return s.begin.length ? [s.begin[0], s.end[s.end.length - 1]] : [0, 1];
  }

  fit() { this.view = this.extent; this.draw(); }

  // Keeps the view inside the run and no narrower than ten microseconds.
  look(from, to) {
    const [low, high] = this.extent;
    const span = Math.min(high - low, Math.max(1e4, to - from));
    const start = Math.min(Math.max(low, from + (to - from - span) / 2), high - span);
    this.view = [start, start + span];
    this.draw();
  }

  zoom(factor) {
    const [from, to] = this.view;
    const pivot = this.pointer ? this.timeAt(this.pointer.x) : (from + to) / 2;
    this.look(pivot - (pivot - from) * factor, pivot + (to - pivot) * factor);
  }

  key(key) {
    const [from, to] = this.view;
    const move = (to - from) / 4;
    if (key === "w") this.zoom(0.6);
    else if (key === "s") this.zoom(1 / 0.6);
    else if (key === "a") this.look(from - move, to - move);
    else if (key === "d") this.look(from + move, to + move);
    else if (key === "f") this.fit();
    else return false;
    return true;
  }

  listen() {
    const canvas = this.canvas;
    let drag = null;
    const at = (event) => ({ x: event.offsetX, y: event.offsetY });
    canvas.addEventListener("pointermove", (event) => {
      this.pointer = at(event);
      if (drag && Math.abs(event.offsetX - drag.x) > 3) {
        drag.moved = true;
        const shift = ((drag.x - event.offsetX) / (this.area.right - this.area.left)) * (drag.view[1] - drag.view[0]);
        this.look(drag.view[0] + shift, drag.view[1] + shift);
      }
      this.hover();
    });
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, view: this.view, moved: false }; });
    window.addEventListener("pointerup", () => { setTimeout(() => { drag = null; }); });
    canvas.addEventListener("pointerleave", () => { this.pointer = null; hideTip(canvas); });
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("click", (event) => {
      const found = drag && drag.moved ? null : this.at(event.offsetX, event.offsetY);
      if (found) this.select(found.index);
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move && known(this.selected)) { event.preventDefault(); this.neighbour(move); }
    });
  }

  neighbour(move) {
    const working = this.run.working;
    const place = working.indexOf(this.selected) + move;
    if (place >= 0 && place < working.length) this.select(working[place]);
  }

  select(index) {
    this.selected = index;
    const s = this.run.steps, [from, to] = this.view;
    if (s.end[index] < from || s.begin[index] > to) {
      const middle = (s.begin[index] + s.end[index]) / 2, half = (to - from) / 2;
      this.look(middle - half, middle + half);
    } else this.draw();
    this.onSelect(index);
  }

  timeAt(x) {
    const [from, to] = this.view;
    return from + ((x - this.area.left) / (this.area.right - this.area.left)) * (to - from);
  }

  // The steps that overlap [from, to): their index range.
  overlap(from, to) {
    const s = this.run.steps;
    let high = upper(s.begin, to);
    while (high > 0 && s.begin[high - 1] >= to) high--;
    return [upper(s.end, from), high];
  }

  draw() {
    const { run, canvas, figure } = this;
    if (!run.working.length) { nothing(canvas, 120, "This run has no steps."); return; }
    const { g, width } = surface(canvas, TIMELINE_HEIGHT);
    const right = width - 46;
    this.area = { left: 52, right, top: 22, bottom: 236 };
    this.strip = { left: 52, right, top: 250, bottom: 270 };
    this.queue = { left: 52, right, top: 296, bottom: 360 };
    this.columns = this.gather();
    this.drawSteps(g);
    this.drawStrip(g);
    this.drawQueue(g);
    this.mark(g);
    this.describe(figure);
  }

  // One entry per pixel column, or per step where steps are wider than three pixels.
  gather() {
    const s = this.run.steps, [from, to] = this.view, { left, right } = this.area;
    const pixels = right - left, perPixel = (to - from) / pixels;
    const [first, last] = this.overlap(from, to);
    this.single = (last - first) * 3 < pixels;
    const columns = [];
    const put = (x0, x1, t0, t1, members) => {
      const work = members.filter((i) => s.kinds[s.kind[i]] !== "idle").sort((a, b) => s.wall[a] - s.wall[b]);
      if (!work.length) return;
      const longest = work.reduce((a, b) => (s.longest[b] > s.longest[a] ? b : a));
      columns.push({ x0, x1, t0, t1, work, middle: work[(work.length - 1) >> 1], longest });
    };
    if (this.single) {
      const x = (t) => left + (t - from) / perPixel;
      for (let i = first; i < last; i++) put(x(s.begin[i]), x(s.end[i]), s.begin[i], s.end[i], [i]);
      return columns;
    }
    for (let p = 0; p < pixels; p++) {
      const t0 = from + p * perPixel, t1 = t0 + perPixel, [low, high] = this.overlap(t0, t1);
      const members = [];
      for (let i = low; i < high; i++) members.push(i);
      put(left + p, left + p + 1, t0, t1, members);
    }
    return columns;
  }

  drawSteps(g) {
    const s = this.run.steps, names = this.run.phases;
    const top = Math.max(...this.columns.map((c) => s.longest[c.longest]), 1) / 1e6;
    const box = plot(g, this.area,
      { low: this.view[0] / 1e9, high: this.view[1] / 1e9, hide: true },
      { low: 0, high: top * 1.04, title: "step time, ms" });
    this.Y = box.Y;
    const inks = names.map((n) => colour(`p-${n}`)), whisker = colour("dim");
    clipped(g, this.area, () => {
      for (const c of this.columns) {
        const gap = this.single && c.x1 - c.x0 > 5 ? 1 : 0;
        let sum = 0;
        names.forEach((name, k) => {
          const part = s.phases[name][c.middle];
          if (!part) return;
          const y1 = box.Y(sum / 1e6), y0 = box.Y((sum + part) / 1e6);
          g.fillStyle = inks[k];
          g.fillRect(c.x0, y0, c.x1 - c.x0 - gap, y1 - y0);
          sum += part;
        });
        const longest = s.longest[c.longest];
        if (longest <= sum) continue;
        const x = (c.x0 + c.x1) / 2 - 0.5, tip = box.Y(longest / 1e6);
        g.fillStyle = whisker;
        g.globalAlpha = 0.2; // where every column has one, the medians must still stand out
        g.fillRect(x, tip, 1, box.Y(sum / 1e6) - tip);
        g.globalAlpha = 1;
        g.fillRect(x, tip, 1, 2);
      }
    });
  }

  // Within a column each verdict's height is its share of the time, never of the steps.
  drawStrip(g) {
    const s = this.run.steps, { left, right, top, bottom } = this.strip;
    const inks = s.verdicts.map((v) => colour(`v-${v}`)), hatch = stripes(g);
    const harm = s.verdicts.map((v) => /stall|pressure|pause/.test(v));
    g.fillStyle = colour("panel");
    g.fillRect(left, top, right - left, bottom - top);
    clipped(g, this.strip, () => {
      for (const c of this.columns) {
        const shares = new Array(inks.length).fill(0);
        for (const i of c.work) shares[s.verdict[i]] += Math.max(1, Math.min(s.end[i], c.t1) - Math.max(s.begin[i], c.t0));
        let y = bottom;
        shares.forEach((share, v) => {
          const height = (share / Math.max(c.t1 - c.t0, 1)) * (bottom - top);
          if (!height) return;
          g.fillStyle = inks[v];
          g.fillRect(c.x0, y - height, c.x1 - c.x0, height);
          if (harm[v]) { g.fillStyle = hatch; g.fillRect(c.x0, y - height, c.x1 - c.x0, height); }
          y -= height;
        });
      }
    });
    g.fillStyle = colour("dim");
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText("verdict", left - 6, (top + bottom) / 2);
  }

  drawQueue(g) {
    const s = this.run.steps, area = this.queue, pages = this.run.kv_total_pages;
    const value = (list) => {
      const points = [];
      let end = null;
      for (const c of this.columns.filter((one) => known(list[one.middle]))) {
        if (end !== null && c.x0 - end > 1.5) points.push([NaN, NaN]); // idle: nothing is known
        points.push([c.x0, list[c.middle]], [c.x1, list[c.middle]]);
        end = c.x1;
      }
      return points;
    };
    const running = value(s.running), waiting = value(s.waiting), used = value(s.kv_used_pages);
    const most = (points) => points.reduce((a, p) => (p[1] > a ? p[1] : a), 1), high = Math.max(most(running), most(waiting));
    const box = plot(g, area,
      { low: this.view[0] / 1e9, high: this.view[1] / 1e9, title: "time since the start of the run, s" },
      { low: 0, high: high * 1.1, title: "requests", format: (t) => (Number.isInteger(t) ? String(t) : "") });
    const full = pages || most(used);
    const K = scale({ low: 0, high: full }, area.bottom, area.top);
    clipped(g, area, () => {
      const stroke = colour("kv-line");
      line(g, used.map(([x, v]) => [x, K(v)]), stroke, 1.5, [2, 3]);
      line(g, running.map(([x, v]) => [x, box.Y(v)]), colour("ink"), 1.8);
      line(g, waiting.map(([x, v]) => [x, box.Y(v)]), colour("accent-2"), 1.8, [6, 3]);
    });
    g.fillStyle = colour("dim");
    g.textAlign = "left";
    g.textBaseline = "middle";
    if (used.length) {
      g.fillText(pages ? "100 %" : count(full), area.right + 5, area.top);
      g.fillText("0", area.right + 5, area.bottom);
      g.fillText("KV", area.right + 5, (area.top + area.bottom) / 2);
    }
  }

  mark(g) {
    if (!known(this.selected)) return;
    const s = this.run.steps, [from, to] = this.view, { left, right, top } = this.area;
    const x = (t) => left + ((t - from) / (to - from)) * (right - left);
    const x0 = Math.max(left, x(s.begin[this.selected])), x1 = Math.min(right, x(s.end[this.selected]));
    if (x1 < left || x0 > right) return;
    g.strokeStyle = colour("ink");
    g.lineWidth = 1.5;
    g.strokeRect(x0 - 1, top - 2, Math.max(2, x1 - x0 + 1), this.strip.bottom - top + 4);
  }

  describe(figure) {
    const s = this.run.steps, [from, to] = this.view, [first, last] = this.overlap(from, to);
    figure.dataset.view = `${Math.round(from)},${Math.round(to)}`;
    const steps = s.count.slice(first, last).reduce((a, n) => a + n, 0);
    // As many decimals as the width of the view can tell apart.
    const decimals = Math.min(9, Math.max(1, 3 - Math.floor(Math.log10((to - from) / 1e9))));
    const second = ns => (ns / 1e9).toFixed(decimals);
    const text = `${second(from)} to ${second(to)} s, ${count(steps)} steps`;
    figure.querySelector(".view").textContent = this.run.reduced ? `${text} (reduced)` : text;
    const seen = (list, names) => names.filter((_, k) => list.some((v) => v === k));
    if (figure.dataset.legend) return;
    figure.dataset.legend = "1";
    const phases = this.run.phases.filter((n) => s.phases[n].some((v) => v));
    const harm = (v) => (/stall|pressure|pause/.test(v) ? "harm" : "");
    legend(figure, [
      ["phases"], ...phases.map((n) => [n, `p-${n}`]), ["longest in the column", "dim", "whisk"],
      ["verdict"], ...seen(s.verdict, s.verdicts).filter((v) => v !== "no_load" && v !== "idle").map((v) => [words(v), `v-${v}`, harm(v)]),
      ["scheduler"], ["running", "ink", "line"], ["waiting", "accent-2", "dash"], ["KV pages", "kv-line", "dots"],
    ]);
  }

  // What stands under the pointer: the drawn (median) step, or the longest where the whisker is.
  at(x, y) {
    const column = (this.columns || []).find((c) => x >= c.x0 && x < c.x1);
    if (!column) return null;
    const s = this.run.steps;
    const above = y < this.area.bottom && y < this.Y(s.wall[column.middle] / 1e6) - 1;
    return { index: above ? column.longest : column.middle, column };
  }

  hover() {
    const found = this.pointer && this.at(this.pointer.x, this.pointer.y);
    if (!found) { hideTip(this.canvas); return; }
    const lines = stepLines(this.run, found.index);
    const others = found.column.work.reduce((sum, i) => sum + this.run.steps.count[i], 0);
    if (others > 1) lines.push(["steps in this column", count(others)]);
    showTip(this.canvas, this.pointer.x, this.pointer.y, stepTitle(this.run, found.index), lines);
  }

  // For the keyboard and for tests: the middle of a step in canvas pixels, if it is in view.
  place(index) {
    const s = this.run.steps, [from, to] = this.view, { left, right, bottom } = this.area;
    const t = (s.begin[index] + s.end[index]) / 2;
    return { x: left + ((t - from) / (to - from)) * (right - left), y: bottom - 4 };
  }
}

function stepTitle(run, i) {
  const s = run.steps;
  return `step ${s.step[i]} · ${s.kinds[s.kind[i]]}${s.warmup[i] ? " · warm-up" : ""}`;
}

function stepLines(run, i) {
  const s = run.steps;
  const lines = [
    ["wall", `${ms(s.wall[i])} ms`], ["verdict", words(s.verdicts[s.verdict[i]])], ["batch", count(s.batch[i])],
    ["context", `${count(s.context_tokens[i])} tokens`],
  ];
  if (s.prefill_tokens[i]) lines.push(["prefill", `${count(s.prefill_tokens[i])} tokens`]);
  for (const name of run.phases) if (s.phases[name][i]) lines.push([name, `${ms(s.phases[name][i])} ms`]);
  lines.push(["weights", size(s.weight_bytes[i])], ["KV", size(s.kv_bytes[i])]);
  lines.push(["bound", known(s.floor_ns[i]) ? `${ms(s.floor_ns[i])} ms` : "n/a"]);
  lines.push(["MBU", percent(known(s.mbu[i]) ? s.mbu[i] / 1e4 : null)]);
  if (s.excess_ns[i]) lines.push(["excess", `${ms(s.excess_ns[i])} ms`]);
  lines.push(["running / waiting", `${count(s.running[i])} / ${count(s.waiting[i])}`]);
  return lines;
}
