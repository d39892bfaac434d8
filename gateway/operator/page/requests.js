// Requests that have ended, each with its story.

import { bar, clock, count, element, seconds } from "./words.js";

// of: what stands beside the time, such as whose request it is; told: its story.
export function list(shown, of, told = story) {
  const longest = Math.max(...shown.map((one) => one.total_s), 0.001);
  return [
    element("p", { class: "key" }, element("span", { class: "waited" }, "waiting"),
      element("span", { class: "prefill" }, "until the first token"), element("span", { class: "decode" }, "answering"),
      `longest: ${seconds(longest)}`),
    element("ol", { class: "ended" }, ...shown.map((one) => request(one, longest, of(one), told(one)))),
  ];
}

function request(one, longest, of, told) {
  const first = Math.max(one.wait_s, one.first_token_s ?? 0);
  const parts = [[one.wait_s, "waited"], [first - one.wait_s, "prefill"], [one.total_s - first, "decode"]];
  return element("li", {},
    element("time", { datetime: new Date(one.arrived_at_s * 1000).toISOString() }, clock(one.arrived_at_s)),
    element("b", {}, ...of),
    element("span", { class: `outcome ${one.state}` }, one.state),
    bar(parts.filter(([s]) => s > 0).map(([s, look]) => [s / longest, look])),
    element("p", {}, told));
}

// waited 4.4 s behind 3 requests of batch: 4.3 s for its turn; first token after 4.5 s; 120 tokens in, 64 out; 6.2 s in all
export function story(one) {
  return [
    one.waited || (one.output_tokens ? "did not wait" : ""),
    one.reason_is,
    one.first_token_s === null ? "" : `first token after ${seconds(one.first_token_s)}`,
    one.prompt_tokens ? `${count(one.prompt_tokens, "token")} in, ${one.output_tokens.toLocaleString("en")} out` : "",
    `${seconds(one.total_s)} in all${one.backend ? `, at ${one.backend}` : ""}`,
  ].filter(Boolean).join("; ");
}
