// Why is a request where it is? What `fairgate explain` says of it, for people.

import { bar } from "./draw.js";
import { facts, why } from "./panels.js";
import { story } from "./requests.js";
import { ask } from "./stream.js";
import { element, percent, seconds, spaced } from "./words.js";

export async function explained(id, { ended, words }) {
  const answer = await ask(`/explain/${encodeURIComponent(id)}`);
  const found = await answer.json();
  return answer.ok ? explanation(found, ended.find((one) => one.request_id === id), words) : unknown(found);
}

function unknown(found) {
  return [
    element("p", {}, `${found.error}.`),
    element("p", {}, "A request that ended longer ago is in the access log: ",
      element("code", {}, "fairgate explain ID -c FILE"), " reads it there."),
  ];
}

function explanation(found, end, words) {
  const { tenant, app, user } = found.flow;
  const known = [
    ["Tenant", tenant], ["App", app], ["User", user], ["Pool", `${found.pool}, policy ${found.policy}`],
    ["Stage", `${found.stage}${found.inside_an_interaction ? ", inside an interaction" : ""}`],
    ["Decided", found.decided_s_ago === null ? null : `${seconds(found.decided_s_ago)} ago`],
    ["Wait told", found.expected_wait_s === null ? null : seconds(found.expected_wait_s)],
    ["Engine", found.decision?.dispatched_to],
    ["Expected cached", found.decision?.tokens_cached_expected ? `${found.decision.tokens_cached_expected} tokens` : null],
    ["Come back", found.decision?.retry_after_s ? `after ${seconds(found.decision.retry_after_s)}` : null],
    ["KV pressure", found.pressure.overloaded ? `overloaded: ${found.pressure.reason}` : "not overloaded"],
    ["How it ended", end ? `${end.outcome}: ${story(end, words)}` : null],
    ["Client's id", found.client_request_id],
  ];
  const others = found.others_of_this_id ?? [];
  return [
    element("p", { class: "reason" }, `${found.reason}.`),
    element("p", {}, found.waited ? `It ${found.waited}.` : "It did not wait."),
    waits(found.waited_s, words),
    table("Whose requests an engine had while it waited", ["tenant", "requests"], Object.entries(found.ahead)),
    facts(known),
    table("Limits of its caller", ["limit", "at most", "left"],
      found.limits.map((one) => [spaced(one.name), one.limit, one.remaining])),
    table("What its place in the order depends on", ["number", "value"],
      Object.entries(found.numbers).map(([name, value]) => [spaced(name), round(value)])),
    table("KV expected at most", ["engine", "of its capacity"],
      Object.entries(found.kv_expected).map(([name, ratio]) => [name, percent(ratio)])),
    others.length ? element("p", {}, "Others of this id: ", ...others.flatMap((id) => [why(id), " "])) : null,
    element("details", {}, element("summary", {}, "All of it, as JSON"),
      element("pre", { tabindex: "0" }, JSON.stringify(found, null, 2))),
  ].filter((each) => each !== null);
}

function waits(bySeconds, words) {
  const found = Object.entries(bySeconds).sort((a, b) => b[1] - a[1]);
  if (!found.length) return null;
  const longest = found[0][1] || 1;
  return element("ul", { class: "bars" }, ...found.map(([obstacle, s]) => element("li", {},
    element("b", {}, words.waits[obstacle] ?? spaced(obstacle)),
    element("span", { class: "numbers" }, seconds(s)), bar(s / longest, { look: "waited" }))));
}

function table(title, heads, rows) {
  if (!rows.length) return null;
  return element("details", { open: rows.length <= 6 }, element("summary", {}, title),
    element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, element("th", { scope: "row" }, String(row[0])),
        ...row.slice(1).map((value) => element("td", {}, String(value))))))));
}

function round(value) {
  return typeof value === "number" ? Number(value.toPrecision(6)).toLocaleString("en") : value;
}
