// What is known of one request, one tenant or one engine: a dialog with an address of its own.

import { bar, ceiling, chart } from "./draw.js";
import { explained } from "./explained.js";
import { facts, range, shareSaid, why } from "./panels.js";
import { list } from "./requests.js";
import { count, element, fill, named, percent, seconds, spaced, sum } from "./words.js";
import { dayOf } from "./usage.js";

const LAST_SHOWN = 8;
const dialog = document.getElementById("explained");
const head = document.getElementById("explained-head");
const body = document.getElementById("explained-body");

// `known`: what the gateway said last. Returns what is to be called whenever it has said more.
export function details(known) {
  let shown = "";
  let day = null;
  const show = () => {
    const [kind, text] = location.hash.slice(1).split("=");
    const of = { explain: null, tenant, engine }[kind];
    if (of === undefined) {
      if (dialog.open) dialog.close();
      return;
    }
    const name = decodeURIComponent(text);
    const isNew = shown !== location.hash;
    shown = location.hash;
    if (isNew) head.textContent = name;
    if (isNew && kind === "explain") answered(() => explained(name, known()), (found) => body.replaceChildren(...found));
    if (isNew && kind === "tenant") {
      day = [];
      if (known().countsUsage) answered(() => dayOf(name), (found) => { day = found; show(); });
    }
    if (kind !== "explain") fill(body, ...of(name, known(), day));
    if (!dialog.open) dialog.showModal();
  };
  const answered = async (ask, then) => {
    const asked = location.hash;
    if (asked.startsWith("#explain=")) body.replaceChildren(element("p", {}, "Asking the gateway."));
    try {
      const found = await ask();
      if (location.hash === asked) then(found);
    } catch (error) {
      if (location.hash !== asked) return;
      then([element("p", {}, `The gateway did not answer: ${error.message || "it asks for the token"}.`)]);
    }
  };
  document.getElementById("explained-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    shown = "";
    if (location.hash) history.replaceState(null, "", location.pathname);
  });
  document.getElementById("find").addEventListener("submit", (event) => {
    event.preventDefault();
    shown = "";
    const hash = `#explain=${encodeURIComponent(document.getElementById("find-id").value.trim())}`;
    if (location.hash === hash) show();
    else location.hash = hash;
  });
  addEventListener("hashchange", show);
  return show;
}

function tenant(name, { minute, points, queue, ended, words, marks }, day) {
  const one = minute?.tenants.find((each) => each.tenant === name);
  const waiting = (queue?.requests ?? []).filter((each) => each.tenant === name);
  const last = ended.filter((each) => each.tenant === name).slice(0, LAST_SHOWN);
  if (!one) return [element("p", {}, "Nothing was asked for by it in this pool in the last 60 s, and it is not configured.")];
  const [owed, alone] = [one.share_due, one.share_by_weight];
  const said = !alone ? "Asked for nothing in the last 60 s."
    : `Received ${shareSaid(one.share_received, owed, alone)}. ` + (owed < 0.98 * alone ? "It asks for less than its weight gives."
      : owed > 1.02 * alone ? "Others ask for less than their weight gives." : "");
  return [
    element("p", { class: "reason" }, said),
    facts([
      ["Weight", one.weight], ["Waiting", count(one.queued_requests, "request")],
      ["Running", count(one.running_requests, "request")],
      ["Waits", one.wait_p50_s === null ? null : `p50 ${seconds(one.wait_p50_s)}, p95 ${seconds(one.wait_p95_s)}`],
      ["Ended", counts(one.ended_requests)], ["Refused", counts(one.refused_requests)],
    ]),
    ...over(points, marks, "Share received and due", { received: "area", due: "due" }, percent, (point) => {
      const found = point.tenants.find(([each]) => each === name);
      return point.tenants.length ? { received: found?.[1] ?? 0, due: found?.[2] ?? 0 } : {};
    }),
    ...over(points, marks, "Wait for an engine, p95", { p95: "line p95" }, seconds,
      (point) => ({ p95: point.tenant_wait_p95_s[name] })),
    ...section("Longest waiting", waiting.slice(0, LAST_SHOWN).map((each) => element("li", {}, why(each.request_id),
      element("span", { class: "numbers" }, seconds(each.wait_s)))), "oldest"),
    ...day,
    ...(last.length ? [element("h3", {}, "Last requests"), ...list(last, words)] : []),
  ];
}

function engine(name, { backends, minute, ended, words }) {
  const one = backends?.backends.find((each) => each.backend === name);
  if (!one) return [element("p", {}, "This pool has no engine of this name.")];
  const running = Object.entries(minute?.running_by_backend[name] ?? {});
  const last = ended.filter((each) => each.backend === name).slice(0, LAST_SHOWN);
  return [
    element("p", { class: "reason" }, !one.in_service ? `Out of service: ${one.reason}.`
      : one.obstacle ? `The next request cannot start here: ${words.obstacles[one.obstacle]}.` : "Has room for the next request."),
    facts([
      ["Address", one.url], ["Sequences", `${one.running_sequences} of ${one.slots} slots`],
      ["KV cache", `${percent(one.kv_ratio)} held (${one.kv_ratio_is}), ${percent(one.kv_expected_ratio)} expected at most`],
      ["KV capacity", one.kv_capacity_tokens ? count(one.kv_capacity_tokens, "token") : "not known"],
      ["Starting", `${count(one.starting_requests, "request")}, ${count(one.starting_prompt_tokens, "prompt token")}`],
      ["Engine", one.engine], ["Read by", one.read_by], ["Not by steps", one.not_by_steps_because],
    ]),
    ...section("Whose requests run here", running.map(([each, requests]) => element("li", {},
      element("b", {}, named("tenant", each)), element("span", { class: "numbers" }, count(requests, "request")),
      bar(requests / running[0][1]))), "bars"),
    ...(last.length ? [element("h3", {}, "Last requests"), ...list(last, words)] : []),
  ];
}

function counts(found) {
  return sum(found) ? Object.entries(found).map(([name, many]) => `${many} ${spaced(name)}`).join(", ") : null;
}

function section(title, items, look) {
  return items.length ? [element("h3", {}, title), element("ul", { class: look }, ...items)] : [];
}

// One drawing over the time of the points; nothing where there is nothing to draw.
function over(points, marks, title, lines, say, of) {
  const { from, to, said } = range(points);
  const seen = points.filter((point) => point.at_s >= from);
  const found = seen.map(of);
  const values = found.flatMap((each) => Object.values(each)).filter((value) => value !== undefined && value !== null);
  if (!values.length) return [];
  const made = chart(lines, { wide: true });
  const series = Object.fromEntries(Object.keys(lines).map((name) => [name, found.map((each) => each[name])]));
  const top = ceiling(Math.max(...values), 0.01);
  made.update(seen.map((point) => point.at_s), series, { from, to, top, marks: marks.filter((mark) => mark.at_s >= from) },
    say(top), `${title}, last ${said}`);
  return [element("h3", {}, `${title}, last ${said}`), made.frame];
}
