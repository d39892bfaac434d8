// The panels: each takes what was said last and puts it in its place.

import { bar, ceiling, chart } from "./draw.js";
import { clock, count, element, fill, named, percent, seconds, spaced, sum } from "./words.js";

const SHARES_SHOWN = 12;
const FEW = 4;
const MANY_ENGINES = 12;
const WAITING_SHOWN = 8;
const OLDEST_SHOWN = 5;
const ROWS_SHOWN = 15;
const SHORT_OF_DUE = 0.8;
const RANGES_S = [60, 120, 300, 600];

const place = (id) => document.getElementById(id);

// A link to the explanation of one request.
export function why(id) {
  return named("explain", id, { class: "id" });
}

// Names and values; what is not known is left out.
export function facts(rows) {
  return element("dl", { class: "facts" }, ...rows.filter(([, value]) => value).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

export function limit(pool, minute, last) {
  const { queue, backends } = pool;
  const inService = backends.backends.filter((one) => one.in_service);
  const sentence = place("limit-sentence");
  sentence.textContent = backends.limited_by_is;
  sentence.dataset.state = !inService.length ? "down" : backends.limited_by ? "limited" : "open";
  const refused = minute.tenants.reduce((total, one) => total + sum(one.refused_requests), 0);
  const figures = [
    ["Waiting", count(queue.queued_requests, "request")],
    ["Running", count(queue.dispatched_requests, "request")],
    ["In service", `${inService.length} of ${count(backends.backends.length, "engine")}`],
    ["Wait, p95", seconds(last?.wait_p95_s)],
    ["First token, p95", seconds(last?.first_token_p95_s)],
    ["Refused, last 60 s", count(refused, "request")],
  ];
  fill(place("figures"), ...figures.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// Which part of the points is drawn: the shortest range that holds them all.
export function range(points) {
  const to = points.length ? points.at(-1).at_s : 1;
  const begun = points.find((point) => point.tenants.length || point.ended) ?? points.at(-1);
  const spanned = points.length ? to - begun.at_s : 0;
  const length = RANGES_S.find((each) => spanned <= each) ?? RANGES_S.at(-1);
  return { from: to - length, to, said: length >= 60 ? `${length / 60} min` : `${length} s` };
}

export class Shares {
  constructor() {
    this.clear();
  }

  clear() {
    this.order = [];
    this.charts = new Map();
  }

  show(points, minute, marks, firstRequest) {
    const body = place("shares-body");
    this.byWeight = new Map(minute.tenants.map((one) => [one.tenant, one.share_by_weight]));
    const { from, to, said } = range(points);
    const seen = points.filter((point) => point.at_s >= from);
    this.#choose(seen);
    if (!this.order.length) {
      this.charts.clear();
      place("shares-scale").textContent = place("shares-others").textContent = "";
      fill(body, firstRequest());
      return;
    }
    const shown = this.order.slice(0, SHARES_SHOWN);
    const series = new Map(shown.map((name) => [name, this.#series(seen, (each) => each === name)]));
    const others = this.#series(seen.slice(-1), (each) => !shown.includes(each));
    const [got, owed] = [others.received[0], others.due[0]];
    place("shares-others").textContent = got > 0 ? `All other tenants together: ${percent(got)}, due ${percent(owed)}.` : "";
    body.classList.toggle("few", series.size <= FEW);
    const top = ceiling(Math.max(...[...series.values()].flatMap((one) => [...one.received, ...one.due])), 0.01);
    place("shares-scale").textContent = `Each 0 to ${percent(top)}, last ${said}.`;
    const times = seen.map((point) => point.at_s);
    const scale = { from, to, top, marks: marks.filter((mark) => mark.at_s >= from) };
    place("shares-marks").textContent = (scale.marks.length ? "Changed: " : "") + scale.marks.map((mark) => `${clock(mark.at_s)} ${mark.text}`).join("; ");
    for (const [name, one] of series) this.#draw(name, one, times, scale);
    const frames = [...series.keys()].map((name) => this.charts.get(name).whole);
    if (frames.length !== body.children.length || frames.some((frame, i) => body.children[i] !== frame)) {
      body.replaceChildren(...frames);
    }
  }

  // Who is drawn keeps its place while it is seen at all.
  #choose(points) {
    const totals = new Map();
    for (const point of points) {
      for (const [name, received, due] of point.tenants) {
        if (name && (received || due)) totals.set(name, (totals.get(name) ?? 0) + received);
      }
    }
    const stay = this.order.filter((name) => totals.has(name));
    const fresh = [...totals.keys()].filter((name) => !stay.includes(name));
    fresh.sort((a, b) => totals.get(b) - totals.get(a) || (a < b ? -1 : 1));
    this.order = [...stay, ...fresh];
  }

  #series(points, isOne) {
    const received = [];
    const due = [];
    for (const point of points) {
      const found = point.tenants.filter(([name]) => isOne(name));
      const isIdle = !point.tenants.length;
      received.push(isIdle ? null : found.reduce((total, each) => total + each[1], 0));
      due.push(isIdle ? null : found.reduce((total, each) => total + each[2], 0));
    }
    return { received, due };
  }

  #draw(name, { received, due }, times, scale) {
    if (!this.charts.has(name)) {
      const made = chart({ received: "area", due: "due" });
      const numbers = element("span", { class: "numbers" });
      const head = element("p", { class: "head" }, element("b", {}, named("tenant", name)), numbers);
      this.charts.set(name, { ...made, numbers, whole: element("div", { class: "share" }, head, made.frame) });
    }
    const one = this.charts.get(name);
    const [got, owed] = [received.at(-1), due.at(-1)];
    const isShort = got !== null && got < SHORT_OF_DUE * owed;
    const said = got === null ? "idle" : shareSaid(got, owed, this.byWeight.get(name));
    one.numbers.textContent = (isShort ? "▼ " : "") + said.replace("; ", "\n");
    one.whole.classList.toggle("short", isShort);
    one.update(times, { received, due }, scale, "", `${name}: received ${said}`);
  }
}

// What it received, what it is due since others ask for less than their part, and what its weight alone would give.
export function shareSaid(got, owed, byWeight) {
  return `${percent(got)}, due ${percent(owed)}` + (byWeight ? `; weight alone ${percent(byWeight)}` : "");
}

export class Times {
  constructor() {
    this.charts = null;
  }

  show(points, marks) {
    const body = place("times-body");
    if (!this.charts) {
      const kinds = [["wait", "Wait for an engine"], ["first_token", "First token, from arrival"]];
      this.charts = kinds.map(([kind, title]) => {
        const made = chart({ p95: "line p95", p50: "line p50" }, { wide: true });
        const numbers = element("span", { class: "numbers" });
        const head = element("p", { class: "head" }, element("b", {}, title), numbers);
        return { kind, title, ...made, numbers, whole: element("div", {}, head, made.frame) };
      });
      this.axis = element("p", { class: "axis" }, element("span"), element("span", {}, "now"));
      body.replaceChildren(...this.charts.map((one) => one.whole), this.axis);
    }
    const { from, to, said } = range(points);
    this.axis.firstChild.textContent = `${said} ago`;
    const seen = points.filter((point) => point.at_s >= from);
    const times = seen.map((point) => point.at_s);
    for (const one of this.charts) {
      const [p50, p95] = ["p50", "p95"].map((part) => seen.map((point) => point[`${one.kind}_${part}_s`]));
      const known = p95.some((value) => value !== null);
      const top = ceiling(Math.max(0, ...p95.filter((value) => value !== null)), 0.01);
      const now = known ? `p50 ${seconds(p50.at(-1))}, p95 ${seconds(p95.at(-1))}` : "none in this time";
      one.numbers.textContent = now;
      one.update(times, { p50, p95 }, { from, to, top, marks: marks.filter((mark) => mark.at_s >= from) }, known ? seconds(top) : "", `${one.title}: ${now}`);
    }
  }
}

function told({ right, longer, shorter }) {
  const all = right + longer + shorter;
  return all ? element("p", { class: "more" }, `${percent(right / all)} of ${count(all, "wait")} of over a second took from half to twice the expected time`) : null;
}

export function waiting(queue) {
  const places = queue.gateways.length ? [element("h3", {}, "At which gateway"), element("ul", { class: "oldest" },
    ...queue.gateways.map((one) => element("li", {}, element("b", {}, one.gateway), element("span", { class: "numbers" },
      `${one.queued_requests} waiting, ${one.dispatched_requests} running`))))] : [];
  const found = queue.tenants.filter((one) => one.queued_requests);
  if (!found.length) {
    fill(place("waiting-body"), element("p", { class: "empty" }, "Nobody waits: each request starts as it comes."), ...places, told(queue.expected_waits));
    return;
  }
  const most = found[0].queued_requests;
  const rows = found.slice(0, WAITING_SHOWN).map((one) => element("li", {},
    element("b", {}, named("tenant", one.tenant)),
    element("span", { class: "numbers" }, `${count(one.queued_requests, "request")}, oldest ${seconds(one.oldest_wait_s)}`),
    bar(one.queued_requests / most)));
  const more = found.length - rows.length + queue.tenants_left_out;
  const oldest = queue.requests.slice(0, OLDEST_SHOWN).map((one) => element("li", {},
    why(one.request_id), element("span", { class: "numbers" }, `${one.tenant}, ${seconds(one.wait_s)}`)));
  fill(place("waiting-body"),
    element("ul", { class: "bars" }, ...rows),
    more ? element("p", { class: "more" }, `and ${count(more, "more tenant")}`) : null,
    ...places,
    told(queue.expected_waits),
    element("h3", {}, "Longest waiting"),
    element("ul", { class: "oldest" }, ...oldest));
}

export function engines(backends, words) {
  const all = backends.backends;
  if (!all.length) {
    fill(place("engines-body"), element("p", { class: "empty" },
      "This pool has no engine. Name one under ", element("code", {}, "pools[].backends"), " in the configuration."));
    return;
  }
  const live = all.filter((one) => one.in_service);
  const running = live.reduce((total, one) => total + one.running_sequences, 0);
  const slots = live.reduce((total, one) => total + one.slots, 0);
  const full = live.filter((one) => one.obstacle).length;
  fill(place("engines-body"),
    element("p", { class: "about" }, `${running} of ${count(slots, "sequence slot")} in use; ${full ?
      `${full} of ${live.length} cannot start the next request` : "nothing keeps the next request from starting"}. `
      + "KV: filled is what is held, the mark what is expected at most."),
    element("ul", { class: all.length > MANY_ENGINES ? "tiles many" : "tiles" }, ...all.map((one) => engine(one, words))));
}

function engine(one, words) {
  const name = element("b", {}, named("engine", one.backend, { title: one.url }));
  if (!one.in_service) {
    return element("li", { class: "tile down" }, name, element("p", {}, `out of service: ${one.reason}`));
  }
  const state = one.obstacle ? words.obstacles[one.obstacle] : "has room";
  return element("li", { class: one.obstacle ? "tile limited" : "tile" }, name,
    element("span", { class: "numbers" }, `${one.running_sequences} of ${one.slots} slots`),
    bar(one.slots ? one.running_sequences / one.slots : 0),
    element("span", { class: "numbers" }, `KV ${percent(one.kv_ratio)}`),
    bar(one.kv_ratio, { mark: one.kv_expected_ratio, look: "kv" }),
    element("p", { title: state }, state, one.starting_requests ? `; ${one.starting_requests} starting` : ""));
}

export function refusals(minute, words) {
  const reasons = new Map();
  for (const one of minute.tenants) {
    for (const [reason, refused] of Object.entries(one.refused_requests)) {
      const found = reasons.get(reason) ?? { total: 0, most: 0, tenant: "" };
      found.total += refused;
      if (refused > found.most) Object.assign(found, { most: refused, tenant: one.tenant });
      reasons.set(reason, found);
    }
  }
  if (!reasons.size) {
    fill(place("refusals-body"), element("p", { class: "empty" }, "Nothing was refused in the last 60 s."));
    return;
  }
  const sorted = [...reasons].sort((a, b) => b[1].total - a[1].total);
  const most = sorted[0][1].total;
  fill(place("refusals-body"), element("ul", { class: "bars" }, ...sorted.map(([reason, found]) => element("li", {},
    element("b", { title: reason }, spaced(reason)),
    element("span", { class: "numbers" }, count(found.total, "request")),
    bar(found.total / most, { look: "bad" }),
    element("p", {}, words.refusals[reason] ? `${words.refusals[reason]}. ` : "", "Most: ", named("tenant", found.tenant), ".")))));
}

export class Tenants {
  constructor() {
    this.isWhole = false;
    this.filter = "";
  }

  show(minute, firstRequest) {
    const body = place("tenants-body");
    if (!minute.tenants.length) {
      fill(body, firstRequest());
      return;
    }
    const found = minute.tenants.filter((one) => one.tenant.toLowerCase().includes(this.filter));
    const shown = (this.isWhole ? found : found.slice(0, ROWS_SHOWN));
    const most = Math.max(...shown.map((one) => Math.max(one.share_received, one.share_due)), 0.0001);
    const rows = shown.map((one) => tenantRow(one, most));
    const heads = [["tenant"], ["weight", "less"], ["received", ""], ["due"], ["weight alone", "less"], ["", "wide-only"], ["queued"],
      ["running", "less"], ["wait p50", "less"], ["wait p95"], ["ended", "less"], ["refused"]];
    const table = element("table", {},
      element("thead", {}, element("tr", {}, ...heads.map(([text, look]) => text ?
        element("th", { scope: "col", class: look }, text) : element("td", { class: look })))),
      element("tbody", {}, ...rows));
    const left = found.length - rows.length;
    fill(body,
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of tenants" }, table),
      left || this.isWhole && found.length > ROWS_SHOWN ? element("button", { type: "button", id: "tenants-whole" },
        this.isWhole ? `Only the first ${ROWS_SHOWN}` : `All ${found.length}`) : null,
      minute.tenants_left_out ? element("p", { class: "more" },
        `The busiest ${minute.tenants.length} of ${minute.tenants.length + minute.tenants_left_out}.`) : null);
  }
}

function tenantRow(one, most) {
  const isIdle = !one.share_by_weight;
  const isShort = one.queued_requests && one.share_received < SHORT_OF_DUE * one.share_due;
  return element("tr", { class: isShort ? "short" : isIdle ? "idle" : "" },
    element("th", { scope: "row" }, named("tenant", one.tenant)),
    element("td", { class: "less" }, String(one.weight)),
    element("td", {}, isIdle ? "idle" : (isShort ? "▼ " : "") + percent(one.share_received)),
    element("td", {}, isIdle ? "–" : percent(one.share_due)),
    element("td", { class: "less" }, isIdle ? "–" : percent(one.share_by_weight)),
    element("td", { class: "wide-only" }, isIdle ? "" : bar(one.share_received / most, { mark: one.share_due / most })),
    element("td", {}, String(one.queued_requests)),
    element("td", { class: "less" }, String(one.running_requests)),
    element("td", { class: "less" }, seconds(one.wait_p50_s)),
    element("td", {}, seconds(one.wait_p95_s)),
    element("td", { class: "less" }, String(sum(one.ended_requests))),
    element("td", {}, String(sum(one.refused_requests))));
}
