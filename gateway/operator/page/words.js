// Numbers with their units, and elements made of plain text: nothing here is ever read as HTML.

export const place = (id) => document.getElementById(id);
const isThere = (child) => child !== null && child !== undefined && child !== "";

export function element(name, fields = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(fields)) if (isThere(value)) made.setAttribute(key, value);
  made.append(...children.filter(isThere));
  return made;
}

export const about = (...text) => element("p", { class: "about" }, ...text);
export const numbers = (text) => element("span", { class: "numbers" }, text);

// Parts beside each other: [ratio, class, what it is]. Widths are set by script, since the page allows no inline style.
export function bar(parts, mark = null) {
  const made = element("span", { class: "bar", "aria-hidden": "true" });
  const width = (ratio) => `${(100 * Math.max(0, Math.min(1, ratio))).toFixed(1)}%`;
  for (const [ratio, look, title] of parts) {
    const part = made.appendChild(element("span", { class: look, title }));
    part.style.width = width(ratio);
  }
  if (mark !== null) made.appendChild(element("span", { class: "mark" })).style.left = width(mark);
  return made;
}

// Put new content where it differs, so that nothing flickers and a selection stays.
export function fill(where, ...children) {
  const kept = [...where.childNodes];
  children = children.filter(isThere);
  const same = kept.length === children.length && children.every((child, i) => kept[i].isEqualNode(child));
  if (!same) where.replaceChildren(...children);
}

export function seconds(value) {
  if (!isThere(value)) return "–";
  if (value >= 7200) return `${Math.round(value / 3600)} h`;
  if (value >= 120) return `${Math.round(value / 60)} min`;
  if (value >= 9.95) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return `${Math.round(value * 1000)} ms`;
}

export function percent(ratio) {
  if (ratio > 0 && ratio < 0.001) return "< 0.1 %";
  return `${(100 * ratio).toFixed(ratio < 0.0995 ? 1 : 0)} %`;
}

export function short(number) {
  return number.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

export function clock(epochS) {
  return new Date(epochS * 1000).toLocaleTimeString("en-GB");
}

// A link to the details of a request ("explain"), a tenant or an engine. The URL is complete, so that no tool
// takes the link for a jump inside the page.
export function named(kind, name, fields = {}) {
  const href = `${location.origin}${location.pathname}#${kind}=${encodeURIComponent(name)}`;
  return element("a", { href, class: "name", title: name, ...fields }, name);
}

// queue_full -> queue full
export function spaced(name) {
  return name.replaceAll("_", " ");
}

export function sum(counts) {
  return Object.values(counts).reduce((total, each) => total + each, 0);
}

// Names and values; unknown values are left out.
export function facts(rows) {
  return element("dl", { class: "facts" }, ...rows.filter(([, value]) => isThere(value)).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

// heads: [text, class] of each column; a row is [class of the row, ...cells], a cell plain text or an element.
export function table(heads, rows, label) {
  const cell = (content, i) => element(i ? "td" : "th", { class: heads[i][1], scope: i ? null : "row" }, content);
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map(([text, look]) =>
      element(text ? "th" : "td", { scope: text ? "col" : null, class: look }, text)))),
    element("tbody", {}, ...rows.map(([look, ...cells]) => element("tr", { class: look }, ...cells.map(cell))))));
}
