// Why is a request where it is? What `fairgate explain` says of it, for people.

import { bar } from "./draw.js";
import { why } from "./panels.js";
import { story } from "./requests.js";
import { ask } from "./stream.js";
import { element, percent, seconds, spaced } from "./words.js";

const dialog = document.getElementById("explained");
const body = document.getElementById("explained-body");
const HASH = "#explain=";

// `known`: what is seen of a request that has ended, and the words of the obstacles.
export function explains(known) {
  const open = () => {
    if (!location.hash.startsWith(HASH)) {
      if (dialog.open) dialog.close();
      return;
    }
    show(decodeURIComponent(location.hash.slice(HASH.length)), known());
  };
  document.getElementById("explained-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    if (location.hash.startsWith(HASH)) history.replaceState(null, "", location.pathname);
  });
  document.getElementById("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const hash = HASH + encodeURIComponent(document.getElementById("find-id").value.trim());
    if (location.hash === hash) open();
    else location.hash = hash;
  });
  addEventListener("hashchange", open);
  return open;
}

async function show(id, { ended, words }) {
  document.getElementById("explained-head").textContent = id;
  body.replaceChildren(element("p", {}, "Asking the gateway."));
  if (!dialog.open) dialog.showModal();
  try {
    const answer = await ask(`/explain/${encodeURIComponent(id)}`);
    const found = await answer.json();
    body.replaceChildren(...(answer.ok ? explanation(found, ended.find((one) => one.request_id === id), words)
      : unknown(found)));
  } catch (error) {
    body.replaceChildren(element("p", {}, `The gateway did not answer: ${error.message || "it asks for the token"}.`));
  }
}

function unknown(found) {
  return [
    element("p", {}, `${found.error}.`),
    element("p", {}, "A request that ended longer ago is in the access log, where ", element("code", {}, "waited_ms"),
      " says what held it back."),
  ];
}

function explanation(found, end, words) {
  const { tenant, app, user } = found.flow;
  const facts = [
    ["Tenant", tenant], ["App", app], ["User", user], ["Pool", `${found.pool}, policy ${found.policy}`],
    ["Stage", `${found.stage}${found.inside_an_interaction ? ", inside an interaction" : ""}`],
    ["Decided", found.decided_s_ago === null ? null : `${seconds(found.decided_s_ago)} ago`],
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
    element("dl", { class: "facts" }, ...facts.filter(([, value]) => value).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, String(value))))),
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
