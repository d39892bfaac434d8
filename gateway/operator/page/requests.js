// The last requests, each with its story.

import { stacked } from "./draw.js";
import { why } from "./panels.js";
import { clock, count, element, fill, named, seconds, spaced } from "./words.js";

const SHOWN = 15;
const SAID_S_MIN = 0.001;

export function requests(ended, words) {
  const body = document.getElementById("requests-body");
  if (!ended.length) {
    fill(body, element("p", { class: "empty" }, "No request has ended since the gateway began."));
    return;
  }
  if (matchMedia("(hover: hover)").matches && body.matches(":hover") || body.matches(":focus-within")) return;
  fill(body, ...list(ended.slice(0, SHOWN), words));
}

export function list(shown, words) {
  const longest = Math.max(...shown.map((one) => one.total_s), 0.001);
  return [
    element("p", { class: "about key" },
      element("span", { class: "waited" }, "waiting"), element("span", { class: "prefill" }, "until the first token"),
      element("span", { class: "decode" }, "answering"), `longest: ${seconds(longest)}`),
    element("ol", { class: "ended" }, ...shown.map((one) => request(one, longest, words))),
  ];
}

function request(one, longest, words) {
  const first = one.first_token_s === null ? one.queue_s : Math.max(one.queue_s, one.first_token_s);
  const parts = [
    [one.queue_s / longest, "waited", "waiting"],
    [(first - one.queue_s) / longest, "prefill", "until the first token"],
    [(one.total_s - first) / longest, "decode", "answering"],
  ];
  return element("li", {},
    element("time", { datetime: new Date(one.ended_at_s * 1000).toISOString() }, clock(one.ended_at_s)),
    element("b", {}, named("tenant", one.tenant), one.app && one.app !== one.tenant ? ` / ${one.app}` : ""),
    element("span", { class: `outcome ${one.outcome}` }, one.outcome),
    why(one.request_id),
    stacked(parts.filter(([ratio]) => ratio > 0)),
    element("p", {}, story(one, words)));
}

// waited 4.4 s (4.3 s for its turn, 29 ms for a sequence slot); first token after 4.5 s; 120 tokens in, 64 out; 6.2 s
export function story(one, words) {
  const said = [];
  const waits = Object.entries(one.waited_s).filter(([, s]) => s >= SAID_S_MIN).sort((a, b) => b[1] - a[1]);
  const parts = waits.map(([obstacle, s]) => `${seconds(s)} ${words.waits[obstacle] ?? spaced(obstacle)}`);
  if (parts.length) said.push(`waited ${seconds(one.queue_s)} (${parts.join(", ")})`);
  else if (one.backend) said.push("did not wait");
  if (one.outcome === "refused") said.push(`refused: ${words.refusals[one.reason] ?? spaced(one.reason)}`);
  else if (one.reason) said.push(spaced(one.reason));
  if (one.first_token_s !== null) said.push(`first token after ${seconds(one.first_token_s)}`);
  if (one.backend) {
    said.push(`${count(one.prompt_tokens, "token")} in, ${one.output_tokens.toLocaleString("en")} out`);
    said.push(`${seconds(one.total_s)} in all, at ${one.backend}`);
  }
  return said.join("; ");
}
