"""What is told after each step is newest first and waits for nobody; what is lines counts only while it can be so."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from backends.step_feed import LATE_S, _Clock, _FeedFault, _StepStream
from backends.vllm_plugin.steps import LISTENERS_MAX, RankState, StepPublisher
from policies.capacity.gauges import Gauges

RANK = {
    "rank": 0, "running": 3, "waiting": 1, "deferred": 1, "free_blocks": 40, "total_blocks": 100, "block_size": 16,
    "kv_tokens": 1600, "scheduled_tokens": 7, "scheduled_tokens_max": 2048, "max_num_seqs": 8, "preemptions_total": 2,
    "prompt_tokens_total": 500,
}  # fmt: skip


def message(seq: int = 1, now_s: float = 100.0, *, ranks: list[dict[str, Any]] | None = None, **fields: Any) -> bytes:
    said = {"v": 1, "start": "a", "seq": seq, "now_s": now_s, "age_s": 0.0, "ranks": [RANK] if ranks is None else ranks}
    return json.dumps({**said, **fields}).encode() + b"\n"


def rank(**fields: Any) -> list[dict[str, Any]]:
    return [{**RANK, **fields}]


def connection(asked_s: float = 50.0) -> _StepStream:
    return _StepStream(_Clock(asked_s))


def steps() -> StepPublisher:
    told = StepPublisher()
    told.ranks[0] = RankState(0, 16, 2048, 8, total_blocks=100, kv_tokens=1600, free_blocks=100)
    return told


def test_a_step_is_facts_as_of_the_step() -> None:
    said = connection().feed(message(age_s=0.004), 50.01)
    assert said is not None
    assert said.taken_s == pytest.approx(49.996)
    assert said == Gauges(
        taken_s=said.taken_s,
        running=3,
        waiting=1,
        kv_usage=0.6,
        kv_capacity_tokens=1600,
        block_size=16,
        preemptions_total=2,
        prompt_tokens_total=500,
        is_step=True,
        scheduled_tokens=7,
        scheduled_tokens_max=2048,
        max_num_seqs=8,
        deferred=1,
    )


def test_long_after_a_step_it_is_no_better_than_a_page() -> None:
    said = connection().feed(message(age_s=0.3), 50.01)
    assert said is not None
    assert (said.taken_s, said.is_step, said.scheduled_tokens, said.running) == (50.0, False, None, 3)


def test_several_ranks_are_a_sum_and_no_facts() -> None:
    said = connection().feed(message(ranks=rank() + rank(rank=1, free_blocks=60)), 50.01)
    assert said is not None
    assert (said.running, said.waiting, said.kv_usage, said.kv_capacity_tokens) == (6, 2, 0.5, 3200)
    assert (said.is_step, said.scheduled_tokens, said.max_num_seqs) == (False, None, None)


def test_of_many_lines_at_once_the_newest_counts_and_half_a_line_waits() -> None:
    lines, cut = connection(), message(3, ranks=rank(running=5))
    said = lines.feed(message(1) + message(2, ranks=rank(running=4)) + cut[:20], 50.0)
    assert said is not None
    assert said.running == 4
    said = lines.feed(cut[20:], 50.1)
    assert said is not None
    assert said.running == 5


def test_what_comes_out_of_order_counts_as_nothing() -> None:
    lines = connection()
    assert lines.feed(message(5), 50.0) is not None
    assert [lines.feed(message(seq, 100.1), 50.1) for seq in (5, 4)] == [None, None]
    assert lines.feed(message(6, 100.2), 50.2) is not None


def test_a_message_that_was_held_up_is_known_to_be_old() -> None:
    lines = connection(asked_s=50.0)
    first = lines.feed(message(1, 100.0), 50.02)
    assert first is not None
    assert first.taken_s == 50.0, "it may have been made when it was asked for"
    held_up = lines.feed(message(2, 101.0), 51.4)
    assert held_up is not None
    assert held_up.taken_s == pytest.approx(51.0, abs=0.002)
    assert lines.feed(message(3, 102.0), 52.0 + LATE_S + 0.1) is None
    assert lines.feed(message(4, 103.0), 53.01) is not None


def test_the_engine_s_clock_may_be_slower_or_faster_than_ours() -> None:
    for rate in (1 - 1e-4, 1 + 1e-4):
        clock = _Clock(0.0)
        for second in range(3600):
            made_s = clock.ours(1000 + second * rate, second + 0.001)
        assert made_s == pytest.approx(3599, abs=0.002)
        assert made_s <= 3599.001


def test_no_clock_makes_a_message_newer_than_its_coming() -> None:
    clock = _Clock(0.0)
    for made_s, now in ((5.0, 1.0), (900.0, 1.1), (4.0, 1.2), (900.1, 1.3)):
        assert clock.ours(made_s, now) <= now


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b"x" * 70_000,
        message(v=2),
        message(now_s=-1.0),
        message(ranks=[]),
        message(ranks=rank(running=-1)),
        message(ranks=rank(running=1 << 50)),
        message(ranks=rank(running=1.5)),
        message(ranks=rank(running=None)),
        message(start="x" * 65),
    ],
    ids=lambda line: repr(line[:60]),
)
def test_nonsense_is_wrong(line: bytes) -> None:
    with pytest.raises(_FeedFault, match="cannot be right"):
        connection().feed(line, 50.0)


def test_another_start_amid_a_connection_ends_it() -> None:
    lines = connection()
    lines.feed(message(1), 50.0)
    with pytest.raises(_FeedFault, match="has ended"):
        lines.feed(message(2, start="b", ranks=rank(prompt_tokens_total=0)), 50.1)


async def test_a_listener_that_does_not_ask_misses_all_but_the_newest() -> None:
    told = steps()
    listener = told.listen()
    assert listener is not None
    assert json.loads(await listener.get())["ranks"][0]["free_blocks"] == 100
    for running in range(1, 4):
        told.ranks[0].running = running
        told.ranks[0].set_usage(running / 100)
        told.stepped()
    newest = json.loads(await listener.get())["ranks"][0]
    assert (newest["running"], newest["free_blocks"]) == (3, 97)
    told.leave(listener)


async def test_without_steps_a_heart_beats_and_only_an_idle_engine_is_known_to_be_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backends.vllm_plugin.steps.HEARTBEAT_S", 0.03)
    told = steps()
    listener = told.listen()
    assert listener is not None
    ages = []
    for unfinished in (0, 1, None):
        told.unfinished = None if unfinished is None else partial(int, unfinished)
        await listener.get()
        ages.append(json.loads(await listener.get())["age_s"])
    assert ages[0] == 0.0
    assert 0 < ages[1] < ages[2]


async def test_listeners_are_bounded_and_end_with_the_feed() -> None:
    told = steps()
    listeners = [told.listen() for _ in range(LISTENERS_MAX)]
    assert told.listen() is None
    told.end("for a reason")
    lines = await asyncio.gather(*[one.get() for one in listeners if one is not None])
    assert lines == [b""] * LISTENERS_MAX
