"use strict";
// The embedded data, and how numbers look. Strings from a run only ever reach textContent.

const DATA = JSON.parse(document.getElementById("data").textContent);

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Decoded once, when the run is first shown.
async function load(run) {
  if (run.steps) return run;
  Object.assign(run, await unpack(run.packed));
  run.packed = "";
  const s = run.steps;
  run.working = [];
  for (let i = 0; i < s.step.length; i++) if (s.kinds[s.kind[i]] !== "idle") run.working.push(i);
  return run;
}

// As stepscope.text.sig: three significant digits; null is n/a, never 0.
function sig(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "n/a";
  if (value === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(value)));
  const places = Math.max(0, digits - 1 - power);
  const scale = 10 ** (digits - 1 - power);
  return (Math.round(value * scale) / scale).toLocaleString("en-US", {
    minimumFractionDigits: places, maximumFractionDigits: places,
  });
}

const known = (value) => value !== null && value !== undefined;
const count = (value) => (known(value) ? value.toLocaleString("en-US") : "n/a");
const ms = (ns) => sig(known(ns) ? ns / 1e6 : null);
const percent = (share) => (known(share) ? `${Math.round(share * 100)} %` : "n/a");
const words = (name) => name.replaceAll("_", "-");

function size(bytes) {
  if (!known(bytes)) return "n/a";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(bytes) < 1000) return `${sig(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${sig(bytes)} TB`;
}

// First index in the ascending list whose value is greater than x.
function upper(list, x) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (known(text)) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Colours follow the theme because they are read from the style sheet at every drawing.
function colour(name) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--${name}`).trim() || style.getPropertyValue("--neutral").trim();
}
