"""Whether agents get to the end of their sessions while another tenant floods, under several policies.

    python -m bench.agents [--window 60] [--grace 60] [--tenants 3] [--workers 2] [--legs ...] [--engine-url URL]

Benign tenants replay recorded agent sessions (`lmcache_agent_sessions.jsonl.gz`: mini-swe and tau-bench): a question,
then tool results, each sent when the answer before has come and its tools have run. A refused call ends its session, as
it does in agent frameworks. The abuser sends single questions on time at 20 times the calls per second of one benign
tenant, with at most 128 open, and pays no attention to refusals.

Prompts are a tenth of what was recorded and answers a quarter, so that the longest fits a context of 4,096 tokens.
Tools take 0.1 s, since the recorded times between calls include the model's; a user takes 5 s between two sessions.
Clients name their interaction in `x-fairgate-interaction`: a model of random weights never asks for a tool, so nothing
could be inferred of its answers.

The first leg runs without the abuser; it sets the abuser's rate and is what sessions' times are compared with. A leg is
measured for `--window` seconds; sessions that have begun then have `--grace` seconds to end, under the same load.

Where a session's time goes is told from both ends: what waits in fairgate's queue by its access log, and what its log
does not have of a call is the way there and back, with reading and writing on busy cores. Up to the first token the
rest is the engine's (its queue and the prompt), after it the answer's, token by token in a batch of so many.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from bench import report
from bench.load import VOCABULARY, Client, Reply
from bench.sessions import TRACE, Conversation, Session, chat, read_sessions
from bench.stack import OUTPUT, PREEMPTIONS, PROMPT, Engine, Route, engine, fairgate, run_bench

TOOLS_S = 0.1
READS_S = 5.0
"""A user's time between two sessions, whether the first was answered or refused."""
ABUSE = 20
ABUSER_OPEN_MAX = 128
ABUSER_WORDS, ABUSER_TOKENS = 200, 100
ABUSER = "abuser"
RAMP_S = 5.0
REPLY_LIMIT_S = 120.0
RETRY_AFTER_S_MAX = 3600
# A flat limit leaves one benign tenant this many times the calls per minute that it makes when nobody floods.
RPM_MARGIN = 1.5


@dataclass(slots=True)
class Parts:
    """Where the time of one session went, in seconds; of the prompts of its calls, what was found in the cache."""

    tools_s: float = 0.0
    way_s: float = 0.0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    answer_s: float = 0.0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: "Parts") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Leg:
    """What one policy did. Times are of sessions that ran to their end, by session and turn of its replay."""

    name: str
    abused: bool
    window_s: float = 0.0
    session_s: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Parts] = field(default_factory=dict)
    begun: int = 0
    unfinished: int = 0
    refused_at_start: int = 0
    cut: int = 0
    benign_calls: int = 0
    benign_refusals: dict[str, int] = field(default_factory=dict)
    abuser_answered: int = 0
    abuser_refusals: dict[str, int] = field(default_factory=dict)
    unusable_retry_after: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    preemptions: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.window_s


class Agents:
    """Benign tenants: each has workers that replay its sessions one after another."""

    def __init__(self, leg: Leg, route: Route, sessions: list[Session], tenants: int, workers: int) -> None:
        self._leg = leg
        self._route = route
        self._client = Client(route.url)
        self._ending = False
        self.tasks = []
        for tenant in range(tenants):
            own = sessions[tenant::tenants]
            for worker in range(workers):
                turns = self._turns(own[worker::workers])
                self.tasks.append(asyncio.create_task(self._work(f"agents{tenant}", turns)))

    @staticmethod
    def _turns(sessions: list[Session]) -> Iterator[tuple[str, Session]]:
        """The same sessions over and over, each turn under a name of its own."""
        for turn in count():
            for session in sessions:
                yield f"{session.name}/{turn}", session

    async def _work(self, tenant: str, turns: Iterator[tuple[str, Session]]) -> None:
        while not self._ending:
            name, session = next(turns)
            await self._replay(tenant, name, session)
            await asyncio.sleep(0.0 if self._ending else READS_S)

    async def _replay(self, tenant: str, name: str, session: Session) -> None:
        loop, leg = asyncio.get_running_loop(), self._leg
        # The same words in no two legs: what one has left in the prefix cache is of no use to the next.
        conversation = Conversation(f"{leg.name}/{leg.abused}/{name}")
        leg.begun += 1
        leg.unfinished += 1
        parts = Parts()
        begin_s = loop.time()
        for number, (words, tokens) in enumerate(session.calls, 1):
            headers = f"x-fairgate-interaction: {name}\r\nx-fairgate-stage: {number}\r\n"
            if number == len(session.calls):
                headers += "x-fairgate-end: true\r\n"
            request = chat(self._route, tenant, conversation.ask(words, tokens), tokens, headers)
            leg.benign_calls += 1
            reply = await self._client.raw(request)
            if not reply.ok:
                self._failed(reply, number)
                return
            answered_s = loop.time()
            parts.first_token_s += reply.ttft_s
            parts.answer_s += answered_s - reply.first_s
            parts.answer_tokens += tokens
            await asyncio.sleep(TOOLS_S)
            parts.tools_s += loop.time() - answered_s
        leg.unfinished -= 1
        leg.session_s[name] = loop.time() - begin_s
        leg.parts[name] = parts

    def _failed(self, reply: Reply, number: int) -> None:
        if reply.broken and self._ending:
            return  # it had its time; it stays unfinished
        leg = self._leg
        leg.unfinished -= 1
        _count(leg.benign_refusals, reply)
        if number == 1:
            leg.refused_at_start += 1
        else:
            leg.cut += 1

    async def end(self, grace_s: float) -> None:
        """No new sessions; those under way may end within this time."""
        self._ending = True
        await asyncio.wait(self.tasks, timeout=grace_s)
        for task in self.tasks:
            task.cancel()
        self._client.abandon(started=True)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._client.close()


class Abuser:
    """One tenant that floods with single questions."""

    def __init__(self, leg: Leg, route: Route, calls_per_s: float) -> None:
        self._leg = leg
        self._route = route
        self._client = Client(route.url)
        self._open: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._flood(1.0 / calls_per_s))

    async def _flood(self, every_s: float) -> None:
        loop, rng = asyncio.get_running_loop(), random.Random(self._leg.name)
        due_s = loop.time()
        while True:
            if len(self._open) < ABUSER_OPEN_MAX:
                text = " ".join(rng.choices(VOCABULARY, k=ABUSER_WORDS))
                request = chat(self._route, ABUSER, [{"role": "user", "content": text}], ABUSER_TOKENS)
                task = asyncio.create_task(self._ask(request))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            due_s = max(due_s + every_s, loop.time() - 1.0)
            await asyncio.sleep(due_s - loop.time())

    async def _ask(self, request: bytes) -> None:
        reply = await self._client.raw(request)
        if reply.ok:
            self._leg.abuser_answered += 1
        elif not reply.broken:
            _count(self._leg.abuser_refusals, reply)
            after = reply.retry_after
            if not (after.isdigit() and 1 <= int(after) <= RETRY_AFTER_S_MAX):
                self._leg.unusable_retry_after += 1

    async def end(self) -> None:
        self._task.cancel()
        self._client.abandon(started=True)
        await asyncio.gather(self._task, *self._open, return_exceptions=True)
        self._client.close()


def read_parts(leg: Leg, access_log: Path) -> None:
    """Tell apart, in what clients saw of each session, what the gateway's log knows of its calls."""
    logged = {_logged(name): name for name in leg.parts}
    with access_log.open() as lines:
        for line in lines:
            row = json.loads(line)
            name = logged.get(row["interaction"])
            if name is None or row["ttft_ms"] is None:
                continue
            parts = leg.parts[name]
            parts.queue_s += row["queue_ms"] / 1000
            parts.way_s -= row["total_ms"] / 1000
            parts.prompt_tokens += row["tokens_in"]
            parts.cached_tokens += row["tokens_cached"]
    for parts in leg.parts.values():
        parts.way_s += parts.first_token_s + parts.answer_s
        parts.first_token_s -= parts.way_s + parts.queue_s


def _logged(interaction: str) -> str:
    """What the access log calls an interaction that its client named so."""
    return hashlib.sha256(b"said\0" + interaction.encode()).hexdigest()[:16]


def _count(refusals: dict[str, int], reply: Reply) -> None:
    reason = _reason(reply)
    refusals[reason] = refusals.get(reason, 0) + 1


def _reason(reply: Reply) -> str:
    """Status and the error's own word for why."""
    if reply.broken or reply.status == 200:
        return reply.failure
    try:
        error = json.loads(reply.body)["error"]
        return f"{reply.status} {error.get('code') or error.get('type')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{reply.status}"


@dataclass(frozen=True, slots=True)
class Load:
    """What runs in every leg."""

    sessions: list[Session]
    tenants: int
    workers: int
    window_s: float
    grace_s: float


async def run_leg(name: str, route: Route, target: Engine, load: Load, abusive_rate: float) -> Leg:
    """One policy under one load; no abuser if its rate is 0."""
    leg = Leg(name, abused=abusive_rate > 0)
    counters = (PROMPT, OUTPUT, PREEMPTIONS)
    await target.wait_idle()
    abuser = Abuser(leg, route, abusive_rate) if abusive_rate else None
    agents: Agents | None = None
    try:
        if abuser is not None:
            await asyncio.sleep(RAMP_S)  # the flood is there before the first session begins
        agents = Agents(leg, route, load.sessions, load.tenants, load.workers)
        begin_s, before = asyncio.get_running_loop().time(), await target.gauges(*counters)
        await asyncio.sleep(load.window_s)
        after = await target.gauges(*counters)
        leg.window_s = asyncio.get_running_loop().time() - begin_s
    finally:
        if agents is not None:
            await agents.end(load.grace_s)
        if abuser is not None:
            await abuser.end()
    await target.wait_idle()
    if route.access_log is not None:
        read_parts(leg, route.access_log)
    leg.prompt_tokens = after[PROMPT] - before[PROMPT]
    leg.output_tokens = after[OUTPUT] - before[OUTPUT]
    leg.preemptions = after[PREEMPTIONS] - before[PREEMPTIONS]
    return leg


def summary(leg: Leg, alone: Leg, direct: Leg | None) -> dict[str, Any]:
    """One leg's numbers, against the one without an abuser and against no gateway at all under the same load."""
    common = [name for name in leg.session_s if name in alone.session_s]
    refusals = sum(leg.abuser_refusals.values())
    throughput = leg.tokens_per_s / direct.tokens_per_s if direct is not None and leg.abused else float("nan")
    return {
        "sessions_begun": leg.begun,
        "sessions_completed": len(leg.session_s),
        "sessions_cut": leg.cut,
        "sessions_refused": leg.refused_at_start,
        "sessions_unfinished": leg.unfinished,
        "session_p50_s": report.median(list(leg.session_s.values())),
        "times_alone": report.median([leg.session_s[name] / alone.session_s[name] for name in common]),
        "times_alone_sum": sum(leg.session_s[n] for n in common) / sum(alone.session_s[n] for n in common)
        if common
        else float("nan"),
        "sessions_compared": len(common),
        "parts": asdict(_mean(leg, common)),
        "parts_alone": asdict(_mean(alone, common)),
        "abuser_answered": leg.abuser_answered,
        "abuser_retry_after_usable": refusals - leg.unusable_retry_after,
        "tokens_per_s": leg.tokens_per_s,
        "times_direct": throughput,
        "leg": asdict(leg),
    }


def _mean(leg: Leg, names: list[str]) -> Parts:
    """Of the sessions of these names."""
    total = Parts()
    for name in names:
        total.add(leg.parts[name])
    return Parts(*(getattr(total, each.name) / max(1, len(names)) for each in fields(total)))


def parts_table(result: dict[str, Any]) -> str:
    """Each leg's sessions that ran to their end, beside the same ones alone."""
    heads = [
        "policy", "sessions compared", "tools", "way", "queue of fairgate", "engine to the first token", "answer",
        "ms per token", "prompt cached",
    ]  # fmt: skip
    rows = []
    for row in result["legs"]:
        name = row["leg"]["name"]
        both = [(f"{name}, abused", row["parts"]), ("the same, alone", row["parts_alone"])]
        for label, parts in both if row["leg"]["abused"] else [(f"{name}, alone", row["parts"])]:
            times = [parts[key] for key in ("tools_s", "way_s", "queue_s", "first_token_s", "answer_s")]
            each_ms = 1000 * parts["answer_s"] / max(1, parts["answer_tokens"])
            cached = f"{parts['cached_tokens'] / parts['prompt_tokens']:.0%}" if parts["prompt_tokens"] else "?"
            seconds = [f"{time:.2f} s" for time in times]
            rows.append([label, str(row["sessions_compared"]), *seconds, f"{each_ms:.1f}", cached])
    return report.table(heads, rows)


def agents_table(result: dict[str, Any]) -> str:
    heads = [
        "policy", "abuser", "sessions begun", "to the end", "cut", "refused", "unfinished", "session p50",
        "times alone", "abuser answered", "refused", "usable Retry-After", "tokens/s", "times direct",
    ]  # fmt: skip
    rows = []
    for row in result["legs"]:
        ends = [row["sessions_completed"], row["sessions_cut"], row["sessions_refused"], row["sessions_unfinished"]]
        abuse = [row["abuser_answered"], sum(row["leg"]["abuser_refusals"].values()), row["abuser_retry_after_usable"]]
        rows.append([
            row["leg"]["name"], "yes" if row["leg"]["abused"] else "no", str(row["sessions_begun"]), *map(str, ends),
            f"{row['session_p50_s']:.1f} s", f"{row['times_alone']:.2f}", *map(str, abuse),
            f"{row['tokens_per_s']:,.0f}", f"{row['times_direct']:.3f}",
        ])  # fmt: skip
    return report.table(heads, rows)


@contextlib.asynccontextmanager
async def open_route(name: str, target: Engine, tenants: list[str], rpm: int) -> AsyncIterator[Route]:
    """The way to the engine under this policy; `direct` is none."""
    if name == "direct":
        yield Route("direct", target.url)
        return
    policy: str | dict[str, object] = name
    if name == "rpm":
        policy = {"name": "rpm", "requests_per_minute": rpm}
    async with fairgate(target.url, dict.fromkeys(tenants, 1.0), policy=policy) as route:
        yield route


async def run(options: argparse.Namespace) -> None:
    load = Load(read_sessions(options.trace), options.tenants, options.workers, options.window, options.grace)
    names = [f"agents{number}" for number in range(load.tenants)] + [ABUSER]
    legs: list[Leg] = []
    rate, rpm = 0.0, 0
    async with engine(options.engine_url) as target:
        for name, abused in [(options.legs[0], False), *((name, True) for name in options.legs)]:
            async with open_route(name, target, names, rpm) as route:
                leg = await run_leg(name, route, target, load, rate if abused else 0.0)
            legs.append(leg)
            if not abused:
                per_tenant = leg.benign_calls / load.tenants / leg.window_s
                rate, rpm = ABUSE * per_tenant, round(RPM_MARGIN * 60 * per_tenant)
            print(
                f"  {name}{', abused' if abused else ''}: {len(leg.session_s)} of {leg.begun} sessions to the end, "
                f"{leg.cut} cut, {leg.tokens_per_s:,.0f} tokens/s",
                flush=True,
            )
            for reason, times in leg.benign_refusals.items():
                print(f"    a benign call failed {times} times: {reason}", flush=True)
    direct = next((leg for leg in legs if leg.name == "direct" and leg.abused), None)
    result: dict[str, Any] = {
        "window_s": load.window_s,
        "tenants": load.tenants,
        "workers": load.workers,
        "abuser_calls_per_s": rate,
        "requests_per_minute": rpm,
        "legs": [summary(leg, legs[0], direct) for leg in legs],
    }
    report.save("agents", result)
    print(f"\n{agents_table(result)}\n\nWhere the time of a session went, mean:\n\n{parts_table(result)}\n")
    print(f"The abuser sends {rate:.1f} calls/s; rpm allows {rpm} a minute and tenant.")
    print(f"{report.SHARED_CORES}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="agent sessions beside a tenant that floods")
    parser.add_argument("--window", type=float, default=60.0, help="seconds measured per leg")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds that sessions have to end after it")
    parser.add_argument("--tenants", type=int, default=3, help="benign tenants")
    parser.add_argument("--workers", type=int, default=2, help="sessions that each of them runs at once")
    parser.add_argument("--legs", type=lambda text: text.split(","), default=["fairserve", "fcfs", "rpm", "direct"])
    parser.add_argument("--trace", type=Path, default=Path(__file__).parents[2] / "shared" / "traces" / TRACE)
    parser.add_argument("--engine-url", help="a running vLLM; default: start the tiny one of deploy/real-vllm")
    options = parser.parse_args()
    if not options.trace.exists():
        parser.exit(2, f"{options.trace} is not there: name the recorded sessions with --trace\n")
    run_bench("agents", run(options))


if __name__ == "__main__":
    main()
