// How is it said? Numbers with their units, and elements made of plain text: nothing here is ever read as HTML.

export function element(name, fields = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(fields)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else if (key === "onclick") made.addEventListener("click", value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Put new content where it differs, so that nothing flickers and a selection stays.
export function fill(place, ...children) {
  const kept = [...place.childNodes];
  children = children.filter((child) => child !== null && child !== undefined);
  const same = kept.length === children.length && children.every((child, i) => kept[i].isEqualNode(child));
  if (!same) place.replaceChildren(...children);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 120) return `${Math.round(value / 60)} min`;
  if (value >= 9.95) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return `${Math.round(value * 1000)} ms`;
}

export function percent(ratio) {
  if (ratio > 0 && ratio < 0.001) return "< 0.1 %";
  return `${(100 * ratio).toFixed(ratio < 0.0995 ? 1 : 0)} %`;
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

export function clock(epochS) {
  return new Date(epochS * 1000).toLocaleTimeString("en-GB");
}

// A link to what is known of a request ("explain"), a tenant or an engine. Whole, so that nobody takes it for one that
// skips to another part of the page.
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
