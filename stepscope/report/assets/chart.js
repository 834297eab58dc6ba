"use strict";
// Axes, ticks and canvases. A plot maps data to pixels; figures draw inside it.

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// Sizes the canvas for the screen's pixel density and clears it.
function surface(canvas, height) {
  const width = Math.max(220, canvas.parentElement.clientWidth);
  const density = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const g = canvas.getContext("2d");
  g.setTransform(density, 0, 0, density, 0, 0);
  g.font = FONT;
  g.fillStyle = colour("bg");
  g.fillRect(0, 0, width, height);
  return { g, width, height };
}

function nothing(canvas, height, why) {
  const { g, width } = surface(canvas, height);
  g.strokeStyle = colour("line");
  g.strokeRect(0.5, 0.5, width - 1, height - 1);
  g.fillStyle = colour("dim");
  g.textAlign = "center";
  g.textBaseline = "middle";
  g.fillText(why, width / 2, height / 2, width - 20);
}

function linearTicks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step || 0); // never -0
  return ticks;
}

// 1-2-5 per decade while they fit, else decades.
function logTicks(low, high, most) {
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const m of steps) {
        const v = m * 10 ** e;
        if (v >= low * 0.999 && v <= high * 1.001) ticks.push(v);
      }
    }
    if (ticks.length <= most || steps.length === 1) return thin(ticks, most);
  }
  return [];
}

function thin(ticks, most) {
  const every = Math.ceil(ticks.length / Math.max(1, most));
  return ticks.filter((_, i) => i % every === 0);
}

// Ticks share their decimals, so that they line up.
function label(value, ticks) {
  const gap = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : Math.abs(value) || 1;
  const places = Math.min(9, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9)));
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

const plain = (value) => value.toLocaleString("en-US", { maximumSignificantDigits: 3 });

function scale(axis, from, to) {
  const f = axis.log ? Math.log10 : (v) => v;
  const low = f(axis.low), span = f(axis.high) - low || 1;
  return (v) => from + ((f(v) - low) / span) * (to - from);
}

// area: {left, top, right, bottom}; x and y: {low, high, log, title, format, hide}.
function plot(g, area, x, y) {
  const X = scale(x, area.left, area.right);
  const Y = scale(y, area.bottom, area.top);
  const xRoom = x.log ? 46 : 76;
  const xt = (x.log ? logTicks : linearTicks)(x.low, x.high, Math.max(2, (area.right - area.left) / xRoom));
  const yt = (y.log ? logTicks : linearTicks)(y.low, y.high, Math.max(2, (area.bottom - area.top) / 34));
  g.lineWidth = 1;
  g.strokeStyle = colour("grid");
  g.fillStyle = colour("dim");
  g.textBaseline = "middle";
  g.textAlign = "right";
  for (const t of yt) {
    rule(g, area.left, Y(t), area.right, Y(t));
    g.fillText(y.format ? y.format(t, yt) : label(t, yt), area.left - 6, Y(t));
  }
  if (!x.hide) xAxis(g, area, x, xt, X);
  g.strokeStyle = colour("dim");
  rule(g, area.left, area.bottom, area.right, area.bottom);
  if (y.title) titleAbove(g, area, y.title);
  return { X, Y, ...area };
}

function xAxis(g, area, x, ticks, X) {
  g.textBaseline = "top";
  g.textAlign = "center";
  for (const t of ticks) {
    rule(g, X(t), area.top, X(t), area.bottom);
    const text = x.format ? x.format(t, ticks) : label(t, ticks);
    const half = g.measureText(text).width / 2;
    g.fillText(text, Math.min(Math.max(X(t), half), area.right + 12 - half), area.bottom + 6);
  }
  g.textAlign = "right";
  if (x.title) g.fillText(x.title, area.right, area.bottom + 22, area.right);
}

function titleAbove(g, area, text) {
  g.textAlign = "left";
  g.textBaseline = "bottom";
  g.fillText(text, Math.max(2, area.left - 40), area.top - 9);
}

function rule(g, x0, y0, x1, y1) {
  g.beginPath();
  g.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
  g.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
  g.stroke();
}

function line(g, points, stroke, width = 1.5, dash = []) {
  g.save();
  g.beginPath();
  let pen = false; // lifted by a NaN
  for (const [x, y] of points) {
    if (pen) g.lineTo(x, y); else g.moveTo(x, y);
    pen = !Number.isNaN(x);
  }
  g.strokeStyle = stroke;
  g.lineWidth = width;
  g.setLineDash(dash);
  g.stroke();
  g.restore();
}

function clipped(g, area, draw) {
  g.save();
  g.beginPath();
  g.rect(area.left, area.top - 1, area.right - area.left, area.bottom - area.top + 2);
  g.clip();
  draw();
  g.restore();
}

// A text on its own background, so that it stays readable over lines.
function note(g, text, x, y, ink, align = "left") {
  g.textAlign = align;
  g.textBaseline = "middle";
  const width = g.measureText(text).width;
  const left = align === "right" ? x - width : align === "center" ? x - width / 2 : x;
  g.fillStyle = colour("bg");
  g.fillRect(left - 2, y - 8, width + 4, 16);
  g.fillStyle = ink;
  g.fillText(text, x, y);
}

// Diagonal stripes in the page's colour: the second sign, beside hue, of what harms.
function stripes(g) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const t = tile.getContext("2d");
  t.strokeStyle = colour("bg");
  t.lineWidth = 1.5;
  for (const shift of [-6, 0, 6]) {
    t.beginPath();
    t.moveTo(shift, 6);
    t.lineTo(shift + 6, 0);
    t.stroke();
  }
  return g.createPattern(tile, "repeat");
}

// Entries are [text, colour, shape]; one with a text alone heads a line of its own.
function legend(figure, entries) {
  const lines = [make("div")];
  for (const [text, name, shape] of entries) {
    if (!name) {
      lines.push(make("div"));
      lines[lines.length - 1].append(make("b", text));
      continue;
    }
    const item = make("span");
    item.append(make("i", null, { class: `swatch ${shape || ""}`, style: `--c:var(--${name},var(--neutral))` }), text);
    lines[lines.length - 1].append(item);
  }
  figure.querySelector(".legend").replaceChildren(...lines.filter((line) => line.childNodes.length));
}

// Places the tip beside the pointer, inside the figure.
function showTip(canvas, x, y, title, lines) {
  const tip = canvas.parentElement.querySelector(".tip");
  const items = lines.map(([key, value]) => {
    const row = make("div");
    row.append(make("span", key), make("span", value));
    return row;
  });
  tip.replaceChildren(make("b", title), ...items);
  tip.hidden = false;
  const room = canvas.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(0, x + 14 > room ? Math.min(room, x - tip.offsetWidth - 14) : x + 14)}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 14, canvas.clientHeight - tip.offsetHeight))}px`;
}

const hideTip = (canvas) => { canvas.parentElement.querySelector(".tip").hidden = true; };
