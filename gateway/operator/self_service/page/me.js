// The page of one tenant: what it gets, what it is due, why it waited, and what is left.

import { list, story } from "./requests.js";
import { follow, hasToken, onToken, showLink } from "./stream.js";
import { used } from "./usage.js";
import { about, bar, clock, count, element, fill, numbers, percent, place, seconds, short, spaced } from "./words.js";

const EVERY_MS = 5000;
const MINUTES_SHOWN = 10;
const SHARES = ["guaranteed_share", "max_share", "lending_limit", "borrowing_limit"];
const row = (name, said, drawn = null) => element("li", {}, element("b", {}, name), " ", numbers(said), drawn);

let me = null;

function show() {
  place("received-head").textContent = `${me.tenant}: received and due`;
  fill(place("now-body"), ...me.pools.flatMap(now));
  const long = Object.entries(me.usage ?? {}).map(([name, one]) => row(`Last ${name}`, used(one)));
  fill(place("received-body"),
    element("ul", { class: "bars" },
      ...me.pools.map((pool) => received(`${of(pool)}Last ${seconds(me.recently_s)}`, pool.recently)), ...long),
    about("Due: your part by weight and groups, and what others leave, at most what you asked for. Your place: ",
      me.place.map(terms).join(" › "), "."),
    me.usage ? null : about("This gateway does not count usage."));
  const limits = me.limits.map((one) => row(spaced(one.name), `${short(one.remaining)} of ${short(one.limit)} left`
    + (one.reset_s ? `, again in ${seconds(one.reset_s)}` : ""), bar([[one.remaining / one.limit, "c0"]])));
  fill(place("limits-body"), limits.length ? element("ul", { class: "bars" }, ...limits) : about("No limit is set for you."));
  requests();
}

const of = (pool) => (me.pools.length > 1 ? `${pool.pool}: ` : "");

function terms({ name, ...set }) {
  const said = Object.entries(set).map(([term, value]) => `${spaced(term)} ${SHARES.includes(term) ? percent(value) : value}`);
  return said.length ? `${name} (${said.join(", ")})` : name;
}

function now(pool) {
  const { interactive, batch } = pool;
  const waiting = interactive.queued_requests + batch.queued_requests;
  const running = interactive.running_requests + batch.running_requests;
  const told = interactive.expected_wait_s === null ? "the wait of a new request is not known yet"
    : interactive.expected_wait_s ? `a new request waits ${interactive.expected_wait_range_s.map(seconds).join(" to ")}` : "a new request starts at once";
  const oldest = Math.max(interactive.oldest_wait_s, batch.oldest_wait_s);
  const waits = waiting ? `${count(waiting, "request")} of yours wait${waiting === 1 ? "s" : ""}, the oldest for ${seconds(oldest)}`
    : "None of your requests waits";
  const open = pool.requests.map((one) => element("li", {}, element("span", { class: "id" }, one.request_id),
    ` ${one.app}, waits for ${seconds(one.wait_s)}`));
  return [
    element("p", { class: "sentence", "data-state": waiting ? "limited" : "open" },
      `${of(pool)}${waits}; ${running} run${running === 1 ? "s" : ""}; ${told}.`),
    pool.ceiling ? about(`Your requests wait because ${pool.ceiling}.`)
      : waiting && pool.waits_for ? about(`The next request of all teams waits ${pool.waits_for}; the others wait for their turn.`) : null,
    about(`Your part of the engines now: ${percent(interactive.share ?? 0)}, if all active tenants want more.`,
      batch.queued_requests + batch.running_requests ? ` Of class batch, ${batch.queued_requests} wait and ${batch.running_requests} run.` : ""),
    open.length ? element("details", {}, element("summary", {}, count(open.length + pool.requests_left_out, "request")),
      element("ul", {}, ...open), pool.requests_left_out ? about(`And ${count(pool.requests_left_out, "more", "more")}.`) : null) : null,
  ].filter(Boolean);
}

function received(name, { service_received: got, service_due: due }) {
  return due ? row(name, `${percent(got / due)} of what was due`, bar([[got / due, "c0"]])) : row(name, "nothing was due");
}

// One row for each minute: how long its requests waited, and why the slowest of them did.
function requests() {
  const filter = place("request-filter").value.trim().toLowerCase();
  const told = ({ minute }) => `${count(minute.requests, "request")}, waited ${seconds(minute.wait_s_mean)} on average`
    + `${minute.not_served ? `, ${minute.not_served} not served: ${minute.reason_is}` : ""}. The slowest: ${story(minute.slowest)}`;
  const rows = me.minutes.map((minute) => ({ ...minute.slowest, minute }));
  const text = (one) => [clock(one.arrived_at_s), one.app, one.model, one.state, one.request_id, told(one)].join(" ").toLowerCase();
  const found = rows.filter((one) => text(one).includes(filter));
  const of = (one) => [one.app, " ", element("span", { class: "id" }, one.request_id)];
  fill(place("requests-body"), ...(found.length ? list(found.slice(0, MINUTES_SHOWN), of, told) :
    [about(rows.length ? "No minute matches." : "None of your requests has ended since the gateway started.")]),
  found.length > MINUTES_SHOWN ? about(`And ${found.length - MINUTES_SHOWN} earlier minutes: ask for one above, such as 10:12.`) : null);
}

function heard(content) {
  me = content;
  show();
  document.body.dataset.shown = "yes";
}

function linked(state, why) {
  const away = `no answer at ${clock(Date.now() / 1000)} (${why}); asking again`;
  showLink(state, { token: "needs your key", live: "live", away }[state]);
}

const go = () => follow("../me", EVERY_MS, heard, linked);
onToken(go);
place("request-filter").addEventListener("input", () => me && requests());
if (hasToken()) go();
else linked("token");
