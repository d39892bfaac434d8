// What each tenant used today. Asked for now and then, since it is summed up from the database.

import { ask } from "./stream.js";
import { count, short } from "./words.js";

const AGAIN_MS = 60000;

export const today = { of: new Map(), fault: "", askedMs: -Infinity };

// Whoever looks at the page all day asks once a minute, and not while it is hidden.
export async function readToday() {
  if (performance.now() - today.askedMs < AGAIN_MS) return;
  today.askedMs = performance.now();
  try {
    const found = await ask("/usage?since=today&by=tenant");
    const content = await found.json();
    if (!found.ok) throw new Error(content.error);
    today.of = new Map(content.rows.map((one) => [one.tenant, one]));
    today.fault = "";
  } catch (error) {
    today.fault = error.message || "the token is missing";
  }
}

export function used(one) {
  const cost = one.cost === undefined || one.cost === null ? "" : `, costs ${one.cost.toFixed(2)}`;
  const unpriced = one.unpriced_tokens ? `, ${short(one.unpriced_tokens)} tokens without a price` : "";
  return `${short(one.input_tokens + one.output_tokens)} tokens, ${count(one.requests, "request")}${cost}${unpriced}`;
}
