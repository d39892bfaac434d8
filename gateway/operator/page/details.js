// What is known of one request, one tenant or one engine: a dialog with an address of its own.

import { list, story } from "./requests.js";
import { ask } from "./stream.js";
import { bar, count, element, facts, fill, named, numbers, percent, place, seconds, spaced, sum, table } from "./words.js";

const LAST_SHOWN = 8;
const dialog = place("explained");
const body = place("explained-body");

// `known`: what the gateway said last. Returns what is to be called whenever it has said more.
export function details(known) {
  let shown = "";
  const show = () => {
    const [kind, text] = location.hash.slice(1).split("=");
    const of = { explain: null, tenant, engine }[kind];
    if (of === undefined) return dialog.close();
    const name = decodeURIComponent(text);
    const isNew = shown !== location.hash;
    shown = location.hash;
    if (isNew) {
      place("explained-head").textContent = name;
      if (kind === "explain") answered(name);
    }
    if (of) fill(body, ...of(name, known()));
    if (!dialog.open) dialog.showModal();
  };
  const answered = async (id) => {
    const asked = location.hash;
    fill(body, element("p", {}, "Asking the gateway."));
    const found = await explained(id, known()).catch((error) =>
      [element("p", {}, `The gateway did not answer: ${error.message || "the token is missing"}.`)]);
    if (location.hash === asked) fill(body, ...found);
  };
  place("explained-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    shown = "";
    if (location.hash) history.replaceState(null, "", location.pathname);
  });
  place("find").addEventListener("submit", (event) => {
    event.preventDefault();
    shown = "";
    location.hash = `#explain=${encodeURIComponent(place("find-id").value.trim())}`;
    show();
  });
  addEventListener("hashchange", show);
  return show;
}

const section = (title, ...found) => (found.length ? [element("h3", {}, title), ...found] : []);
const idOf = (one) => named("explain", one.request_id, { class: "id" });
const last = (ended) => (ended.length ? section("Last requests", ...list(ended.slice(0, LAST_SHOWN), (one) => [idOf(one)])) : []);
const counts = (found) => (sum(found) ? Object.entries(found).map(([name, many]) => `${many} ${spaced(name)}`).join(", ") : null);

function tenant(name, { pool, ended }) {
  const one = pool?.tenants.find((each) => each.tenant === name);
  if (!one) return [element("p", {}, "No request of this tenant in this pool in the last 60 s, and the tenant is not configured.")];
  const waiting = pool.requests.filter((each) => each.tenant === name).slice(0, LAST_SHOWN);
  return [
    element("p", { class: "reason" }, !one.is_active ? "No request in the last 60 s."
      : `Received ${percent(one.share_received)} of the pool's service, due ${percent(one.share_due)}.`),
    facts([
      ["Group", one.group], ["Weight", one.weight],
      ["Waiting", count(one.queued_requests, "request")], ["Running", count(one.running_requests, "request")],
      ["Waits", one.wait_p50_s === null ? null : `p50 ${seconds(one.wait_p50_s)}, p95 ${seconds(one.wait_p95_s)}`],
      ["Ended", counts(one.ended_requests)], ["Refused", counts(one.refused_requests)],
    ]),
    ...(waiting.length ? section("Longest waiting", element("ul", {}, ...waiting.map((each) => element("li", {},
      idOf(each), ` ${seconds(each.wait_s)}`)))) : []),
    ...last(ended.filter((each) => each.tenant === name)),
  ];
}

function engine(name, { pool, ended }) {
  const one = pool?.backends.find((each) => each.backend === name);
  if (!one) return [element("p", {}, "This pool has no engine of this name.")];
  const running = Object.entries(one.running_by_tenant);
  return [
    element("p", { class: "reason" }, !one.in_service ? `Out of service: ${one.reason}.`
      : one.obstacle ? `The next request cannot start here: ${one.obstacle_is}.` : "Has room for the next request."),
    facts([
      ["Address", one.url], ["Sequences", `${one.running_sequences} of ${one.slots} slots`],
      ["KV cache", `${percent(one.kv_ratio)} held (${one.kv_ratio_is}), ${percent(one.kv_expected_ratio)} expected at most`],
      ["KV capacity", one.kv_capacity_tokens ? count(one.kv_capacity_tokens, "token") : "not known"],
      ["Starting", `${count(one.starting_requests, "request")}, ${count(one.starting_prompt_tokens, "prompt token")}`],
      ["Engine", one.engine], ["Read by", one.read_by], ["Not by steps", one.not_by_steps_because],
    ]),
    ...(running.length ? section("Running requests by tenant", element("ul", { class: "bars" }, ...running.map(([each, requests]) =>
      element("li", {}, named("tenant", each), " ", numbers(count(requests, "request")),
        bar([[requests / running[0][1], "c0"]]))))) : []),
    ...last(ended.filter((each) => each.backend === name)),
  ];
}

// Why is a request where it is? What `fairgate explain` says of it.
async function explained(id, { ended }) {
  const answer = await ask(`/explain/${encodeURIComponent(id)}`);
  const found = await answer.json();
  if (!answer.ok) {
    return [element("p", {}, `${found.error}.`), element("p", {}, "Older requests are in the access log: ",
      element("code", {}, "fairgate explain ID -c FILE"), " reads them.")];
  }
  const { tenant: whose, app, user } = found.flow;
  const { decision, pressure } = found;
  const end = ended.find((one) => one.request_id === id);
  const folded = (title, heads, rows) => {
    const made = element("details", {}, element("summary", {}, title),
      table(heads.map((head) => [head]), rows.map((row) => ["", ...row.map(String)]), title));
    made.open = rows.length <= 6;
    return rows.length ? made : null;
  };
  const readable = (value) => (typeof value === "number" ? Number(value.toPrecision(6)).toLocaleString("en") : value);
  const others = found.others_of_this_id ?? [];
  return [
    element("p", { class: "reason" }, `${found.reason}.`),
    element("p", {}, found.waited ? `The request ${found.waited}.` : "The request did not wait."),
    facts([
      ["Tenant", whose], ["App", app], ["User", user], ["Pool", `${found.pool}, policy ${found.policy}`],
      ["Stage", `${found.stage}${found.inside_an_interaction ? ", inside an interaction" : ""}`],
      ["Decided", found.decided_s_ago === null ? null : `${seconds(found.decided_s_ago)} ago`],
      ["Expected wait", found.expected_wait_s === null ? null : seconds(found.expected_wait_s)],
      ["Engine", decision?.dispatched_to],
      ["Expected cached", decision?.tokens_cached_expected ? `${decision.tokens_cached_expected} tokens` : null],
      ["Retry after", decision?.retry_after_s ? seconds(decision.retry_after_s) : null],
      ["KV pressure", pressure.overloaded ? `overloaded: ${pressure.reason}` : "not overloaded"],
      ["End", end ? `${end.state}: ${story(end)}` : null],
      ["Client's id", found.client_request_id],
    ]),
    folded("Requests that ran while this one waited", ["tenant", "requests"], Object.entries(found.ahead)),
    folded("Limits of its tenant and key", ["limit", "at most", "left"],
      found.limits.map((one) => [spaced(one.name), one.limit, one.remaining])),
    folded("Numbers that decide its place in the order", ["number", "value"],
      Object.entries(found.numbers).map(([name, value]) => [spaced(name), readable(value)])),
    folded("Largest expected KV", ["engine", "of its capacity"],
      Object.entries(found.kv_expected).map(([name, ratio]) => [name, percent(ratio)])),
    others.length ? element("p", {}, "Other requests with this id: ", ...others.flatMap((id) => [idOf({ request_id: id }), " "])) : null,
    element("details", {}, element("summary", {}, "Everything, as JSON"), element("pre", { tabindex: "0" }, JSON.stringify(found, null, 2))),
  ];
}
