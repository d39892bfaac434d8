// Who used most today? What `fairgate usage` says, asked for now and then: it is summed up from the database.

import { bar, bars } from "./draw.js";
import { ask } from "./stream.js";
import { count, element, fill, named, seconds } from "./words.js";

const AGAIN_MS = 60000;
const SHOWN = 8;
const HOUR_MS = 3600000;

export class Usage {
  constructor() {
    this.askedMs = -Infinity;
  }

  // Whoever looks at the page all day asks once a minute, and not while it is hidden.
  async show(countsUsage) {
    const body = document.getElementById("usage-body");
    if (!countsUsage) {
      fill(body, element("p", { class: "empty" }, "Usage is not counted. Name a file for it in the configuration: ",
        element("code", {}, "usage: /var/lib/fairgate/usage.db")));
      return;
    }
    if (performance.now() - this.askedMs < AGAIN_MS) return;
    this.askedMs = performance.now();
    try {
      const [tenants, hours] = [await answer("since=today&by=tenant"), await answer("since=24h&by=hour")];
      fill(body, ...used(tenants), ...byHour(hours.rows));
    } catch (error) {
      fill(body, element("p", { class: "empty" }, `Usage cannot be read: ${error.message || "the token is asked for"}.`));
    }
  }
}

async function answer(query) {
  const found = await ask(`/usage?${query}`);
  const content = await found.json();
  if (!found.ok) throw new Error(content.error);
  return content;
}

function used({ rows, total }) {
  if (!rows.length) return [element("p", { class: "empty" }, "Nobody has used anything since midnight (UTC).")];
  const most = Math.max(...rows.map(tokens), 1);
  return [
    element("ul", { class: "bars" }, ...rows.slice(0, SHOWN).map((one) => element("li", {},
      element("b", {}, named("tenant", one.tenant)),
      element("span", { class: "numbers" }, said(one)),
      bar(tokens(one) / most)))),
    element("p", { class: "more" }, `All ${count(rows.length, "tenant")} since midnight (UTC): ${said(total)}, `
      + `${seconds(wait(total))} in the queue on average.`),
  ];
}

function said(one) {
  const cost = one.cost === undefined || one.cost === null ? "" : `, costs ${one.cost.toFixed(2)}`;
  const unpriced = one.unpriced_tokens ? `, ${short(one.unpriced_tokens)} tokens without a price` : "";
  return `${short(tokens(one))} tokens, ${count(one.requests, "request")}${cost}${unpriced}`;
}

// What was used and how long was waited in each of the last 24 hours, of all or of one tenant.
export function byHour(rows) {
  const now = Math.floor(Date.now() / HOUR_MS) * HOUR_MS;
  const known = new Map(rows.map((one) => [Date.parse(one.hour), one]));
  const hours = Array.from({ length: 24 }, (_, i) => known.get(now - (23 - i) * HOUR_MS));
  if (!rows.length) return [];
  const titles = hours.map((one, i) => `${new Date(now - (23 - i) * HOUR_MS).toTimeString().slice(0, 5)}: ` +
    (one ? `${said(one)}, ${seconds(wait(one))} of wait on average` : "nothing"));
  const drawn = (name, values, say) => {
    const most = Math.max(...values);
    const title = `${name} by hour, last 24 h: at most ${say(most)}`;
    return [element("h3", {}, title), bars(values.map((value) => value / (most || 1)), title, titles)];
  };
  return [
    ...drawn("Tokens", hours.map((one) => (one ? tokens(one) : 0)), short),
    ...drawn("Average wait", hours.map((one) => (one ? wait(one) : 0)), seconds),
    element("p", { class: "axis" }, element("span", {}, "23 h ago"), element("span", {}, "this hour")),
  ];
}

// The same of one tenant: asked for when somebody looks at it.
export async function dayOf(tenant) {
  const { rows } = await answer("since=24h&by=hour,tenant");
  return byHour(rows.filter((one) => one.tenant === tenant));
}

function wait(one) {
  return one.queue_s / Math.max(1, one.requests);
}

function tokens(one) {
  return one.input_tokens + one.output_tokens;
}

function short(number) {
  return number.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}
