"""Sessions of real clients, as they are and varied: each is one interaction, and no two of them are the same one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Peer, Seen, Upstream, answer, chunk
from tests.gateway.live import MODEL, Live, Starter
from tests.gateway.recorded_sessions import CLIENTS, VARIATIONS, Call, recorded, twin


def streamed(whole: Any) -> bytes:
    """The same answer as a stream."""
    choice = whole["choices"][0]
    message = choice["message"]
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
    deltas: list[Any] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word + " "} for word in (message.get("content") or "").split(" ") if word]
    deltas += [{"tool_calls": [call]} for call in calls]
    events = b"".join(_event(whole, delta, None) for delta in deltas) + _event(whole, {}, choice["finish_reason"])
    return STREAM_HEAD + chunk(events + DONE) + STREAM_END


def _event(whole: Any, delta: Any, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value = {"id": whole["id"], "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Sessions:
    """Sends sessions through one gateway to an engine that answers as was recorded."""

    def __init__(self, live: Live, answers: dict[str, Call]) -> None:
        self._live = live
        self._answers = answers

    async def names(self, sessions: list[list[Call]], **headers: str) -> list[list[str]]:
        """What the access log calls the interactions of these sessions, whose calls are sent by turns, by one user."""
        key, found = f"user-{len(self._answers)}", [list[str]() for _ in sessions]
        for number in range(max(map(len, sessions))):
            for at, calls in enumerate(sessions):
                if number < len(calls):
                    own = {header: value.format(at) for header, value in headers.items()}
                    found[at].append(await self._sent(calls[number], key, **own))
        logged = {line["request_id"]: line["interaction"] for line in await self._live.lines(len(self._answers))}
        return [[logged[id_] for id_ in ids] for ids in found]

    async def _sent(self, call: Call, key: str, **headers: str) -> str:
        """The id of the request."""
        name = str(len(self._answers))
        self._answers[name] = call
        got = await self._live.ask(call.path, {**call.body, "model": MODEL}, key=key, x_call=name, **headers)
        assert got.status == 200, got.body
        return got.headers["x-request-id"]


@pytest.fixture
async def sent(start: Starter) -> AsyncIterator[Sessions]:
    answers: dict[str, Call] = {}

    async def script(seen: Seen, peer: Peer) -> None:
        call = answers[seen.headers["x-call"]]
        await peer.send(streamed(call.answer) if call.body.get("stream") else answer(json.dumps(call.answer).encode()))

    async with Upstream(script) as upstream, start(upstream.url) as live:
        yield Sessions(live, answers)


def is_told_apart(found: list[list[str]]) -> bool:
    return all(len(set(own)) == 1 for own in found) and len({own[0] for own in found}) == len(found)


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_session_is_one_interaction_without_a_header(sent: Sessions, client: str) -> None:
    for name, vary in VARIATIONS.items():
        if (client, name) == ("magentic-one", "earlier turns pruned"):
            continue  # its agents have no turns in common but the long ones, whose texts are pruned
        found = await sent.names(recorded(client, vary))
        assert is_told_apart(found), "\n".join(map(str, (name, *found)))


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_same_question_side_by_side_is_two(sent: Sessions, client: str) -> None:
    first, _ = recorded(client, VARIATIONS["as it is"])
    found = await sent.names([first, twin(first)])
    assert is_told_apart(found), "\n".join(map(str, found))


@pytest.mark.parametrize("client", CLIENTS)
async def test_with_a_session_header_even_a_lost_history_cuts_nothing(sent: Sessions, client: str) -> None:
    found = await sent.names(recorded(client, compacted), x_session_id="session-{}")
    assert is_told_apart(found), "\n".join(map(str, found))


def compacted(turns: list[Any], number: int, calls: int) -> list[Any]:
    """From the middle on there is a summary in the place of all that was said before."""
    return turns if number < calls // 2 else [{"role": "user", "content": f"Summary of {number} calls."}]
