// Small drawings: a share over time, times over time, and bars.

import { element } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 100;

function shape(name, fields) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(fields)) made.setAttribute(key, value);
  return made;
}

// Points outside the time shown are left out; a null breaks the line.
function path(times, values, from, to, top, isArea) {
  let said = "";
  let begun = null;
  let last = 0;
  const close = () => {
    if (begun !== null && isArea) said += `L${last} ${HEIGHT}L${begun} ${HEIGHT}Z`;
    begun = null;
  };
  times.forEach((time, i) => {
    const value = values[i];
    if (time < from || value === null || value === undefined) return close();
    const x = round((WIDTH * (time - from)) / (to - from));
    const y = round(HEIGHT * (1 - Math.min(1, value / top)));
    said += `${begun === null ? "M" : "L"}${x} ${y}`;
    begun ??= x;
    last = x;
  });
  close();
  return said;
}

function round(number) {
  return Math.round(number * 10) / 10;
}

// lines: {name: class}. Returns the frame and update(times, series by name, {from, to, top, marks}, the highest value said).
export function chart(lines, { wide = false } = {}) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  for (const y of [0, HEIGHT / 2]) svg.append(shape("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: "grid" }));
  const paths = {};
  for (const [name, look] of Object.entries(lines)) svg.append((paths[name] = shape("path", { class: look })));
  svg.append(shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT, class: "base" }));
  const marked = svg.appendChild(shape("g", {}));
  const high = element("span", { class: "high" });
  const frame = element("div", { class: wide ? "chart wide" : "chart" }, svg, high);
  function update(times, series, { from, to, top, marks = [] }, said, label) {
    for (const [name, line] of Object.entries(paths)) {
      line.setAttribute("d", path(times, series[name], from, to, top, lines[name].includes("area")));
    }
    marked.replaceChildren(...marks.map(({ at_s, text }) => {
      const x = round((WIDTH * (at_s - from)) / (to - from));
      const line = shape("line", { x1: x, x2: x, y1: 0, y2: HEIGHT, class: "changed" });
      line.append(titled(text));
      return line;
    }));
    if (high.textContent !== said) high.textContent = said;
    svg.setAttribute("aria-label", label);
  }
  return { frame, update };
}

// The least of 1, 2 and 5 times a power of ten that is not below.
export function ceiling(value, least) {
  let step = 10 ** Math.floor(Math.log10(Math.max(value, least)));
  for (const factor of [1, 2, 5, 10]) if (factor * step >= value * 0.999 && factor * step >= least) return factor * step;
  return value;
}

// A part of 1, and a mark on it. Widths are set by script, since the page allows no inline style.
export function bar(ratio, { mark = null, look = "" } = {}) {
  const filled = element("span", { class: `filled ${look}` });
  filled.style.width = `${(100 * Math.max(0, Math.min(1, ratio))).toFixed(1)}%`;
  const made = element("span", { class: "bar", "aria-hidden": "true" }, filled);
  if (mark !== null) {
    const tick = element("span", { class: "mark" });
    tick.style.left = `${(100 * Math.max(0, Math.min(1, mark))).toFixed(1)}%`;
    made.append(tick);
  }
  return made;
}

// Parts beside each other: [ratio, class, what it is].
export function stacked(parts) {
  const made = element("span", { class: "bar stacked", "aria-hidden": "true" });
  for (const [ratio, look, title] of parts) {
    const part = element("span", { class: look, title });
    part.style.width = `${(100 * ratio).toFixed(1)}%`;
    made.append(part);
  }
  return made;
}

function titled(text) {
  const made = shape("title", {});
  made.textContent = text;
  return made;
}

// One column for each part of 1, and what it says when one points at it.
export function bars(ratios, label, titles) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const width = WIDTH / ratios.length;
  ratios.forEach((ratio, i) => {
    const height = round(HEIGHT * ratio);
    const column = shape("rect", { x: round(i * width + 1), y: HEIGHT - height, width: round(width - 2), height, class: "column" });
    column.append(titled(titles[i]));
    svg.append(column);
  });
  svg.append(shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT, class: "base" }));
  return element("div", { class: "chart" }, svg);
}
