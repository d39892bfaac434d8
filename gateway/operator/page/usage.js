// What was used: today by each tenant, and by the hour. Asked for now and then, since it is summed up from the database.

import { columns } from "./draw.js";
import { ask } from "./stream.js";
import { count, element, seconds, short } from "./words.js";

const AGAIN_MS = 60000;
const HOUR_MS = 3600000;
const tokens = (one) => one.input_tokens + one.output_tokens;
const wait = (one) => one.queue_s / Math.max(1, one.requests);

async function rows(query) {
  const found = await ask(`/usage?${query}`);
  const content = await found.json();
  if (!found.ok) throw new Error(content.error);
  return content.rows;
}

export const today = { of: new Map(), fault: "", askedMs: -Infinity };

// Whoever looks at the page all day asks once a minute, and not while it is hidden.
export async function readToday() {
  if (performance.now() - today.askedMs < AGAIN_MS) return;
  today.askedMs = performance.now();
  try {
    today.of = new Map((await rows("since=today&by=tenant")).map((one) => [one.tenant, one]));
    today.fault = "";
  } catch (error) {
    today.fault = error.message || "the token is missing";
  }
}

export function used(one) {
  const cost = one.cost === undefined || one.cost === null ? "" : `, costs ${one.cost.toFixed(2)}`;
  const unpriced = one.unpriced_tokens ? `, ${short(one.unpriced_tokens)} tokens without a price` : "";
  return `${short(tokens(one))} tokens, ${count(one.requests, "request")}${cost}${unpriced}`;
}

export async function dayOf(tenant) {
  return byHour((await rows("since=24h&by=hour,tenant")).filter((one) => one.tenant === tenant));
}

// What was used and how long was waited in each of the last 24 hours.
export function byHour(found) {
  if (!found.length) return [];
  const now = Math.floor(Date.now() / HOUR_MS) * HOUR_MS;
  const known = new Map(found.map((one) => [Date.parse(one.hour), one]));
  const hours = Array.from({ length: 24 }, (_, i) => known.get(now - (23 - i) * HOUR_MS));
  const titles = hours.map((one, i) => `${new Date(now - (23 - i) * HOUR_MS).toTimeString().slice(0, 5)}: ` +
    (one ? `${used(one)}, ${seconds(wait(one))} of wait on average` : "nothing"));
  const drawn = (name, numbers, say) => {
    const title = `${name} by hour, last 24 h: at most ${say(Math.max(...numbers))}`;
    return [element("h3", {}, title), columns(numbers, title, titles)];
  };
  return [
    ...drawn("Tokens", hours.map((one) => (one ? tokens(one) : 0)), short),
    ...drawn("Average wait", hours.map((one) => (one ? wait(one) : 0)), seconds),
    element("p", { class: "axis" }, element("span", {}, "23 h ago"), element("span", {}, "this hour")),
  ];
}
