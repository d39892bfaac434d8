"""Conversations that several tenants hold at once, made up from a seed, and what came back of them.

Answers come back in the history as words of their length: what a model of random weights says does not survive being
read again, so no route could find it cached.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench import report
from bench.load import VOCABULARY, Client, Reply
from bench.sessions import chat
from bench.stack import Route

REFUSED = 429
TRIES_MAX = 8
"""A call that is refused so often ends its conversation."""
BEGIN_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How many conversations, and how long they get; lengths in tokens. `tools`: turns after the first are results.

    `common`: half of all calls begin with one prefix of this length, and none has a history.
    """

    tenants: int = 3
    talks: int = 14
    turns: int = 7
    system: int = 400
    turn: int = 60
    answer: int = 40
    pause_s: tuple[float, float] = (0.0, 1.0)
    tools: bool = False
    common: int = 0

    @property
    def working_set(self) -> int:
        """Tokens that an engine would have to keep so that every call finds its history."""
        return self.tenants * (self.system + self.talks * self.turns * (self.turn + self.answer))

    def filling(self, tokens: int) -> "Shape":
        """The same with so many conversations that the working set is this large."""
        each = self.turns * (self.turn + self.answer)
        return replace(self, talks=math.ceil((tokens / self.tenants - self.system) / each))


@dataclass(frozen=True, slots=True)
class Call:
    """One turn: how long its sender thinks before it, and all that it sends."""

    pause_s: float
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation of one tenant."""

    name: str
    tenant: str
    calls: list[Call]
    is_interaction: bool


def tenants(shape: Shape) -> dict[str, float]:
    """Who talks, all with the same weight."""
    return {f"talker{number}": 1.0 for number in range(shape.tenants)}


def make_talks(shape: Shape, seed: str) -> list[Talk]:
    """All conversations; two seeds have no words in common."""
    common = _words(random.Random(seed), shape.common)
    found = []
    for tenant in tenants(shape):
        system = _words(random.Random(f"{seed}/{tenant}"), shape.system)
        for number in range(shape.talks):
            name = f"{seed}/{tenant}/{number}"
            rng = random.Random(name)
            calls = _single_calls(shape, common, rng) if shape.common else _growing_calls(shape, system, rng)
            found.append(Talk(name, tenant, calls, shape.tools))
    return found


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(VOCABULARY, k=count))


def _single_calls(shape: Shape, common: str, rng: random.Random) -> list[Call]:
    """Every other one begins with the common prefix; with which of the two it begins is by chance."""
    first = rng.randrange(2)
    calls = []
    for turn in range(shape.turns):
        words = _words(rng, shape.turn)
        text = f"{common} {words}" if (first + turn) % 2 else words
        calls.append(Call(rng.uniform(*shape.pause_s), [{"role": "user", "content": text}]))
    return calls


def _growing_calls(shape: Shape, system: str, rng: random.Random) -> list[Call]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    calls = []
    for turn in range(shape.turns):
        sender = {"role": "tool", "tool_call_id": f"call-{turn}"} if shape.tools and turn else {"role": "user"}
        messages.append(sender | {"content": _words(rng, shape.turn)})
        calls.append(Call(rng.uniform(*shape.pause_s), list(messages)))
        answer: dict[str, Any] = {"role": "assistant", "content": _words(rng, shape.answer)}
        if shape.tools:
            call = {"id": f"call-{turn + 1}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
            answer["tool_calls"] = [call]
        messages.append(answer)
    return calls


@dataclass(slots=True)
class Outcome:
    """What came back of all conversations. `refused`: calls that had to be sent again."""

    wall_s: float = 0.0
    replies: list[Reply] = field(default_factory=list)
    refused: int = 0

    @property
    def answered(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.ok]

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens, those that the engines found cached, by their usage."""
        prompts = sum(reply.prompt_tokens for reply in self.answered)
        return sum(reply.cached_tokens for reply in self.answered) / prompts if prompts else math.nan

    def measures(self) -> dict[str, float]:
        ttft_s = [reply.ttft_s for reply in self.answered]
        return {
            "cached": self.cached_share,
            "ttft_p50_s": report.median(ttft_s),
            "ttft_p95_s": report.quantile(ttft_s, 0.95),
            "wall_s": self.wall_s,
            "answered": len(self.answered),
            "refused": self.refused,
            "failed": len(self.replies) - len(self.answered),
        }

    def failures(self) -> list[str]:
        return [reply.failure for reply in self.replies if not reply.ok]


async def hold(talks: Sequence[Talk], route: Route, answer: int) -> Outcome:
    """Holds all conversations at once; each goes round the addresses of the route, turn by turn."""
    clients = [Client(url) for url in route.urls]
    outcome = Outcome()
    begin_s = asyncio.get_running_loop().time()
    tasks = [
        asyncio.create_task(_hold(talk, number, route, clients, answer, outcome)) for number, talk in enumerate(talks)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for client in clients:
            client.close()
        for task in tasks:
            task.cancel()
    outcome.wall_s = asyncio.get_running_loop().time() - begin_s
    return outcome


async def _hold(
    talk: Talk, number: int, route: Route, clients: Sequence[Client], answer: int, outcome: Outcome
) -> None:
    await asyncio.sleep(random.Random(talk.name).uniform(0, BEGIN_WITHIN_S))
    for turn, call in enumerate(talk.calls):
        await asyncio.sleep(call.pause_s)
        headers = f"x-fairgate-interaction: {talk.name}\r\nx-fairgate-stage: {turn + 1}\r\n"
        request = chat(route, talk.tenant, call.messages, answer, headers if talk.is_interaction else "", usage=True)
        reply = await _ask(clients[(number + turn) % len(clients)], request, outcome)
        outcome.replies.append(reply)
        if not reply.ok:
            return


async def _ask(client: Client, request: bytes, outcome: Outcome) -> Reply:
    """The answer, however often it takes to get it; its time counts from the first try."""
    first_s = asyncio.get_running_loop().time()
    for _ in range(TRIES_MAX - 1):
        reply = await client.raw(request, first_s)
        if reply.status != REFUSED:
            return reply
        outcome.refused += 1
        await asyncio.sleep(reply.again_after_s)
    return await client.raw(request, first_s)
