"""The loads of `bench.locality` are what its tables say, and its tables show what was measured."""

import math

import pytest

from bench.load import Reply
from bench.locality import CASES, Column, engine_flags, largest_over_mean, locality_table
from bench.stack import BenchError
from bench.talks import Call, Outcome, Shape, make_talks
from bench.ways import chosen

SMALL = Shape(tenants=2, talks=3, turns=4, system=30, turn=6, answer=5)


def words(call: Call) -> str:
    return " ".join(message["content"] for message in call.messages)


def usage(prompt: int, cached: int) -> Reply:
    reply = Reply(0.0)
    reply.status = 200
    reply.body = b'{"usage": {"prompt_tokens": %d, "prompt_tokens_details": {"cached_tokens": %d}}}' % (prompt, cached)
    return reply


def test_every_turn_begins_with_the_whole_turn_before_it() -> None:
    talks = make_talks(SMALL, "seed")
    assert len(talks) == 6
    for talk in talks:
        assert len(talk.calls) == 4
        for before, after in zip(talk.calls, talk.calls[1:], strict=False):
            assert after.messages[: len(before.messages)] == before.messages
        assert [len(words(call).split()) for call in talk.calls] == [36, 47, 58, 69]


def test_conversations_share_the_system_prompt_of_their_tenant_and_nothing_else() -> None:
    talks = make_talks(SMALL, "seed")
    systems = {talk.tenant: {talk.calls[0].messages[0]["content"]} for talk in talks}
    for talk in talks:
        systems[talk.tenant].add(talk.calls[0].messages[0]["content"])
    assert [len(each) for each in systems.values()] == [1, 1]
    assert len(set.union(*systems.values())) == 2
    assert len({talk.calls[0].messages[1]["content"] for talk in talks}) == 6


def test_the_same_seed_gives_the_same_words_and_another_one_others() -> None:
    assert make_talks(SMALL, "seed") == make_talks(SMALL, "seed")
    first, second = ({words(talk.calls[0])[:40] for talk in make_talks(SMALL, seed)} for seed in ("one", "two"))
    assert not first & second


def test_of_agents_every_result_names_the_call_that_it_answers() -> None:
    shape = Shape(tenants=1, talks=1, turns=3, tools=True)
    [talk] = make_talks(shape, "seed")
    messages = talk.calls[-1].messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    for asked, told in zip(messages[2::2], messages[3::2], strict=True):
        assert asked["tool_calls"][0]["id"] == told["tool_call_id"]


def test_half_of_the_calls_begin_with_the_common_prefix() -> None:
    shape = Shape(tenants=1, talks=5, turns=4, turn=10, common=50)
    lengths = sorted(len(words(call).split()) for talk in make_talks(shape, "seed") for call in talk.calls)
    assert lengths == [10] * 10 + [60] * 10
    long = [words(call) for talk in make_talks(shape, "seed") for call in talk.calls if len(words(call).split()) == 60]
    assert len({" ".join(text.split()[:50]) for text in long}) == 1
    assert len(set(long)) == 10


@pytest.mark.parametrize("tokens", [10_020, 144_000])
def test_a_working_set_is_as_large_as_it_is_asked_to_be(tokens: int) -> None:
    one_more = SMALL.tenants * SMALL.turns * (SMALL.turn + SMALL.answer)
    assert tokens <= SMALL.filling(tokens).working_set < tokens + one_more


def test_the_cached_share_is_of_all_prompt_tokens_of_whole_replies() -> None:
    broken = usage(1000, 1000)
    broken.broken = True
    outcome = Outcome(replies=[usage(100, 0), usage(300, 200), broken])
    assert outcome.cached_share == 0.5
    assert (outcome.measures()["answered"], outcome.measures()["failed"]) == (2, 1)
    assert math.isnan(Outcome().cached_share)


def test_an_even_load_is_one() -> None:
    assert (largest_over_mean([5, 5, 5]), largest_over_mean([9, 0, 0])) == (1, 3)
    assert math.isnan(largest_over_mean([0, 0]))


def test_a_column_compares_within_each_round_and_leaves_out_what_is_missing() -> None:
    rounds = [
        {"fairgate": {"ttft": 1.0}, "direct": {"ttft": 2.0}},
        {"fairgate": {"ttft": 9.0}},
        {"fairgate": {"ttft": 3.0}, "direct": {"ttft": 4.0}},
    ]
    over = Column("over direct", "ttft", "{:.2f}", "direct")
    assert over.values(rounds, "fairgate") == [0.5, 0.75]
    assert over.cell(over.values(rounds, "fairgate")) == "0.62 (0.50 to 0.75)"
    assert over.cell([]) == "-"


def test_a_way_without_results_has_a_row_without_numbers() -> None:
    table = locality_table(
        {"case": "weights", "routes": ["fairgate", "direct"], "rounds": [{"fairgate": {"off": 0.1}}]}
    )
    rows = table.splitlines()[2:]
    assert rows[0].startswith("| fairgate | - | 10.0% |")
    assert rows[1].count("-") == len(CASES["weights"].columns)


def test_an_engine_has_one_block_that_holds_nothing() -> None:
    assert "751" in engine_flags(6)


def test_fairgate_is_measured_once_with_each_policy() -> None:
    assert chosen(["fairgate", "direct"], []) == ["fairgate", "direct"]
    assert chosen(["fairgate", "direct"], ["vtc", "dlpm"]) == ["fairgate vtc", "fairgate dlpm", "direct"]
    with pytest.raises(BenchError, match="nginx round"):
        chosen(["nginx round"], [])
