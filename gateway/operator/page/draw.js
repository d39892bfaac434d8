// Small drawings: parts of a bar, what waited over time, and columns by hour.

import { element } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 100;
const round = (number) => Math.round(number * 10) / 10;

function shape(name, fields, title = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(fields)) made.setAttribute(key, value);
  if (title) made.append(Object.assign(document.createElementNS(SVG, "title"), { textContent: title }));
  return made;
}

function drawing(label, shapes, said) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  svg.append(...shapes, shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT, class: "base" }));
  return element("div", { class: "chart" }, svg, element("span", { class: "high" }, said));
}

// Parts beside each other: [ratio, class, what it is]. Widths are set by script, since the page allows no inline style.
export function bar(parts, mark = null) {
  const made = element("span", { class: "bar", "aria-hidden": "true" });
  const percent = (ratio) => `${(100 * Math.max(0, Math.min(1, ratio))).toFixed(1)}%`;
  for (const [ratio, look, title] of parts) {
    const part = made.appendChild(element("span", { class: look, title }));
    part.style.width = percent(ratio);
  }
  if (mark !== null) made.appendChild(element("span", { class: "mark" })).style.left = percent(mark);
  return made;
}

// series: [class, title, one number for each step], drawn one upon another.
export function stack(series, label, said) {
  const steps = series[0]?.[2].length ?? 0;
  const heights = Array.from({ length: steps }, (_, i) => series.reduce((total, [, , found]) => total + found[i], 0));
  const most = Math.max(1, ...heights);
  const below = new Array(steps).fill(0);
  const x = (i) => round((WIDTH * i) / Math.max(1, steps - 1));
  const line = (heights) => heights.map((height, i) => `${x(i)} ${round(HEIGHT * (1 - height / most))}`);
  const areas = series.map(([look, title, found]) => {
    const floor = line(below).reverse();
    found.forEach((number, i) => { below[i] += number; });
    return shape("path", { class: look, d: `M${line(below).join("L")}L${floor.join("L")}Z` }, title);
  });
  return drawing(label, areas, said(most));
}

// One column for each number, and what it says when one points at it.
export function columns(numbers, label, titles) {
  const width = WIDTH / numbers.length;
  const most = Math.max(...numbers) || 1;
  return drawing(label, numbers.map((number, i) => {
    const height = round((HEIGHT * number) / most);
    const place = { x: round(i * width + 1), y: HEIGHT - height, width: round(width - 2), height };
    return shape("rect", { ...place, class: "c0" }, titles[i]);
  }), "");
}
