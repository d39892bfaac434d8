"""Every format that operators have is read as it is, and what is wrong in a file is said with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lab import public_traces
from policies.request import Claim, Flow
from simulation.run import Arrival
from simulation.traces.lines import TraceError
from simulation.traces.reader import Trace
from simulation.traces.rows import AccessLogLine, PlainCsvLine
from tests.kit.access_logs import LINE, logged, write

FORMATS = {row.format: row for row in (AccessLogLine, PlainCsvLine, *public_traces.PUBLIC_ROWS)}
SHARED = Path(__file__).parents[3] / "shared" / "traces"


def traced(*paths: Path, **options: Any) -> Trace:
    """A trace of any format, as `fairgate replay` reads it in a clone of the repository."""
    return Trace(*paths, **{"row": public_traces.row_of(*paths), **options})


def read(directory: Path, *lines: str, **options: Any) -> list[Arrival]:
    return list(traced(write(directory, *lines), **options).arrivals(16))


def said(time_s: float, text: str, answer: str, session: str = "s", **more: Any) -> str:
    """A line of an agent's session as LMCache publishes them."""
    return json.dumps({
        "timestamp": int(time_s * 1e6), "input": text, "output": answer, "session_id": session, **more,
    })  # fmt: skip


PUBLISHED = {
    "csv": ("t_s,client,input_tokens,output_tokens", "0.5,a,10,20", "1.5,b,30,40"),
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,10,20",
        "2023-11-16 18:15:47.6805900,30,40",
    ),
    "burstgpt": ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
                 "5,ChatGPT,10,20,30,Conversation log", "6,GPT-4,30,40,70,API log"),
    "mooncake": ('{"timestamp": 500, "input_length": 10, "output_length": 20, "hash_ids": [0]}',
                 '{"timestamp": 1500, "input_length": 30, "output_length": 40, "hash_ids": [1]}'),
    "qwen": ('{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 10, "output_length": 20, '
             '"type": "text", "turn": 1, "hash_ids": [7]}',
             '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 1.5, "input_length": 30, "output_length": 40, '
             '"type": "text", "turn": 2, "hash_ids": [7, 8]}'),
    "lmcache": (said(1_760_428_437, "x" * 120, "y" * 157), said(1_760_428_436, "x" * 40, "y" * 80)),
    "agents": ('{"app": "x", "session": "s", "call": 0, "t_s": 0.0, "est_input_tokens": 10, "est_output_tokens": 20, '
               '"hash_ids": []}',
               '{"app": "x", "session": "s", "call": 1, "t_s": 1.0, "est_input_tokens": 30, "est_output_tokens": 40, '
               '"hash_ids": []}'),
    "fairgate": (logged(tokens_in=10, tokens_out=20), logged(ts=1001.5, tokens_in=30, tokens_out=40)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told_by_its_columns_and_read_alike_from_gzip(tmp_path: Path, name: str) -> None:
    plain = write(tmp_path, *PUBLISHED[name])
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    trace = traced(plain)
    assert (trace.format, trace.requests, trace.span_s) == (name, 2, 1.0)
    arrivals = list(trace.arrivals(16))
    assert [(each.arrived_s, each.prompt_tokens, each.output_tokens) for each in arrivals] == [(0, 10, 20), (1, 30, 40)]
    assert len({each.id for each in arrivals}) == 2
    assert list(traced(packed).arrivals(16)) == arrivals


def test_azure_2024_has_offsets_and_burstgpt_2_has_sessions(tmp_path: Path) -> None:
    azure = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-12 00:00:00.001163+00:00,10,20",
        "2024-05-12 00:00:01+00:00,30,40",
    )
    assert azure[1].arrived_s == pytest.approx(0.998837)
    burst = read(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log",
        "19440161.0,,2,ChatGPT,36,0,36,API log",
    )
    assert [each.flow for each in burst] == [Flow("all", "Conversation log", "1722ac82"), Flow("all", "API log")]
    assert burst[1].output_tokens == 446, "a response of nothing is one that failed: as long as the mean"


def test_the_access_log_says_who_asked_when_and_for_what_as_far_as_it_is_new_enough(tmp_path: Path) -> None:
    [arrival] = read(tmp_path, logged())
    assert arrival.flow == Flow("alice", "chat", "u")
    assert (arrival.prompt_tokens, arrival.output_tokens, arrival.output_tokens_max) == (100, 20, 50)
    assert (arrival.weight, arrival.streamed, arrival.claim) == (2.0, True, Claim("i", 3, begins=False))
    newer = ("user", "weight", "interaction", "stage", "tokens_out_max")
    [arrival] = read(tmp_path, json.dumps({name: value for name, value in LINE.items() if name not in newer}))
    assert (arrival.flow, arrival.weight, arrival.output_tokens_max) == (Flow("alice", "chat"), 1.0, 4096)


def test_lines_of_the_access_log_are_put_in_order_of_arrival(tmp_path: Path) -> None:
    """They are written when requests end: a long one that came first has a later line."""
    arrivals = read(
        tmp_path,
        logged(ts=110.0, total_ms=1000.0, tokens_in=2),
        logged(ts=120.0, total_ms=20_000.0, tokens_in=1),
        logged(ts=120.5, total_ms=500.0, tokens_in=3),
    )
    assert [(each.prompt_tokens, each.arrived_s) for each in arrivals] == [(1, 0.0), (2, 9.0), (3, 20.0)]


def test_what_never_asked_an_engine_is_skipped_and_what_had_no_answer_is_assumed(tmp_path: Path) -> None:
    lines = (
        logged(tokens_out=10),
        logged(tokens_out=30),
        logged(app="other", tokens_out=90),
        logged(outcome="refused", reason="queue_full", tokens_in=0, tokens_in_estimated=70, tokens_out=0),
        logged(outcome="refused", reason="invalid_api_key", tokens_in=0, tokens_in_estimated=0, tokens_out=0),
        logged(outcome="abandoned", tokens_in=50, tokens_out=7),
    )
    trace = traced(write(tmp_path, *lines))
    assert (trace.requests, trace.skipped, trace.assumed) == (5, 1, 1)
    arrivals = list(trace.arrivals(16))
    assert [each.output_tokens for each in arrivals] == [10, 30, 90, 16, 7], "the mean of 10, 30 and 7"
    assert arrivals[3].prompt_tokens == 70


NAMED = {"tenant": "acme", "app": "chat", "user": 7, "weight": 2.5}


@pytest.mark.parametrize("name", FORMATS)
def test_whoever_knows_tenant_app_and_user_writes_them_into_any_format(tmp_path: Path, name: str) -> None:
    lines = PUBLISHED[name]
    if FORMATS[name].is_csv:
        named = [lines[0] + "".join(f",{column}" for column in NAMED)]
        named += [line + "".join(f",{value}" for value in NAMED.values()) for line in lines[1:]]
    else:
        named = [json.dumps(json.loads(line) | NAMED) for line in lines]
    trace = traced(write(tmp_path, *named))
    assert trace.format == name
    assert {each.flow for each in trace.arrivals(16)} == {Flow("acme", "chat", "7")}
    assert trace.weights == {"acme": 2.5}


def test_weights_that_are_given_hold_whatever_the_trace_says(tmp_path: Path) -> None:
    lines = [logged(tenant="a", weight=2.0), logged(tenant="b", weight=3.0)]
    trace = traced(write(tmp_path, *lines), weights={"a": 5.0, "c": 7.0})
    assert trace.weights == {"a": 5.0, "b": 3.0}
    assert sorted(each.weight for each in trace.arrivals(16)) == [3.0, 5.0]


def test_who_leaves_before_an_answer_in_one_piece_had_not_read_enough(tmp_path: Path) -> None:
    """A flood that is broken off asked for whole answers: the few short ones that it got say little of the others."""
    cut = {"outcome": "abandoned", "stream": False, "tokens_out": 40}
    arrivals = read(
        tmp_path,
        logged(tokens_out=20, stream=False),
        *(logged(**cut, tokens_out_max=200) for _ in range(3)),
        logged(**cut | {"tokens_out": 0}, tokens_out_max=80),
        logged(**cut | {"stream": True}),
    )
    assert [each.output_tokens for each in arrivals] == [20, 130, 130, 130, 80, 40], "a mean of 180 tokens / 2"


def test_requests_for_other_models_are_left_out(tmp_path: Path) -> None:
    lines = [
        logged(model="a"),
        logged(model="b"),
        logged(model="b", tokens_in=0, tokens_in_estimated=0),
        logged(model=""),
    ]
    trace = traced(write(tmp_path, *lines), models=("a", "c"))
    assert (trace.requests, trace.elsewhere, trace.skipped) == (2, 1, 1)
    with pytest.raises(TraceError, match=r"no request to replay \(1 lines skipped, 2 of other models\)"):
        traced(write(tmp_path, *lines[:3]), models=("c",))


def test_agent_sessions_are_read_as_they_are_published(tmp_path: Path) -> None:
    """A file for each session, in no order inside; some are empty, some answers ask for a tool and show no text."""
    directory = tmp_path / "sessions"
    directory.mkdir()
    system = "You are an agent. " * 50
    sessions = {
        "b": [said(20.5, system + "b, again", "y" * 40, "b"), said(20, system + "b", "", "b")],
        "a": [said(10, system + "a", "y" * 400, "a"), said(30, "", "y", "a"), said(31, "é" * 10, "y", "a")],
        "none": [],
    }
    for name, lines in sessions.items():
        (directory / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    trace = traced(*sorted(directory.iterdir(), reverse=True))
    assert (trace.format, trace.requests, trace.skipped, trace.assumed) == ("lmcache", 4, 1, 1)
    assert trace.name == "a.jsonl and 1 more"
    first, begins, again, last = trace.arrivals(16)
    assert [each.arrived_s for each in (first, begins, again, last)] == [0.0, 10.0, 10.5, 21.0]
    assert [each.flow.user for each in (first, begins, again, last)] == ["a", "b", "b", "a"]
    assert first.claim == Claim("a", explicit=True)
    assert (first.prompt_tokens, first.output_tokens) == (226, 100), "four bytes are a token"
    assert (last.prompt_tokens, begins.output_tokens) == (5, round((100 + 10 + 1) / 3))
    blocks = 900 // 256 * 256 // 4 // 16
    assert first.prefix[:blocks] == begins.prefix[:blocks] == again.prefix[:blocks]
    assert first.prefix[blocks:] != begins.prefix[blocks:]


def test_a_log_that_grows_is_read_up_to_one_point(tmp_path: Path) -> None:
    whole = [logged(ts=1000.0 + number) for number in range(3)]
    path = write(tmp_path, *whole)
    with path.open("a") as log:
        log.write(logged(ts=1010.0)[:40])
        log.flush()
        trace = traced(path)
        assert (trace.requests, trace.foreign) == (3, 0), "the line that is being written is not there yet"
        log.write(logged(ts=1010.0)[40:] + "\n" + logged(ts=1011.0) + "\n")
        log.flush()
        assert len(list(trace.arrivals(16))) == len(list(trace.arrivals(16))) == 3
    assert traced(path).requests == 5
    path.write_text("\n".join(whole))
    assert traced(path).requests == 3, "a last line that is whole counts without its end"


def test_a_log_among_what_others_write_is_found_nested_as_deep_as_they_like(tmp_path: Path) -> None:
    """The output of a container: what a gateway says at its start, and a line that broke off when it was killed."""
    lines = ("fairgate: serving on http://127.0.0.1:8080", "  pool main: 2 backends, policy fairserve", logged(),
             logged()[:100], "INFO fairgate: draining", logged(ts=1001.0), logged()[:30] + logged())  # fmt: skip
    trace = traced(write(tmp_path, *lines))
    assert (trace.format, trace.requests, trace.foreign) == ("fairgate", 2, 5)
    assert len(list(trace.arrivals(16))) == 2
    assert trace.foreign == 5
    path = write(tmp_path, logged(), '{"x":' + "[" * 100_000, logged(ts=1001.5))
    path.write_bytes(path.read_bytes() + b'{"x":' + b"[" * 100_000)
    trace = traced(path)
    assert (trace.requests, trace.foreign) == (2, 1)


def test_rotated_logs_are_read_in_the_order_of_their_time(tmp_path: Path) -> None:
    days = [tmp_path / name for name in ("access.log", "access.log.1", "access.log.2.gz")]
    days[0].write_text(logged(ts=200_000.0, tokens_in=3))
    days[1].write_text(logged(ts=100_000.0, tokens_in=2))
    days[2].write_bytes(gzip.compress(logged(ts=1000.0, tokens_in=1).encode()))
    assert [each.prompt_tokens for each in traced(*days).arrivals(16)] == [1, 2, 3]
    days[1].write_text(f"{logged(ts=100_000.0)}\n{logged(ts=100_000.0, tokens_in=-1)}")
    with pytest.raises(TraceError, match=r"access\.log\.1:2: column 'tokens_in': Expected `int` >= 0"):
        traced(*days)


def test_equal_blocks_of_a_trace_are_equal_blocks_of_the_engine(tmp_path: Path) -> None:
    def prefixes(*hash_ids: list[int], block_size: int) -> list[tuple[int, ...]]:
        lines = [
            json.dumps({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
            for ids in hash_ids
        ]
        return [each.prefix for each in traced(write(tmp_path, *lines)).arrivals(block_size)]

    one, other = prefixes([1, 2], [1, 3], block_size=128)
    assert (len(one), one[:4]) == (8, other[:4])
    assert not set(one[4:]) & set(other[4:])
    assert len(set(one)) == 8
    one, other = prefixes([1, 2], [3, 2], block_size=512)
    assert not set(one) & set(other), "an equal block behind an unequal one is not a common prefix"
    one, other = prefixes([1, 2, 3, 4], [1, 2, 3, 5], block_size=1024)
    assert (len(one), one[0] == other[0], one[1] == other[1]) == (2, True, False)


def test_what_was_cached_is_the_common_beginning_of_an_app(tmp_path: Path) -> None:
    first, again, elsewhere = read(tmp_path, logged(), logged(), logged(app="other"))
    assert len(first.prefix) == 100 // 16
    assert first.prefix[:4] == again.prefix[:4]
    assert first.prefix[4] != again.prefix[4]
    assert not set(first.prefix) & set(elsewhere.prefix)


def test_speed_limit_and_format_are_obeyed(tmp_path: Path) -> None:
    lines = PUBLISHED["mooncake"]
    quick = traced(write(tmp_path, *lines), speed=4.0)
    assert ([each.arrived_s for each in quick.arrivals(16)], quick.span_s) == ([0.0, 0.25], 0.25)
    assert len(read(tmp_path, *lines, limit=1)) == 1
    with pytest.raises(TraceError, match=r"trace:1: column 'chat_id': missing here \(format qwen needs timestamp, "):
        read(tmp_path, *lines, row=public_traces.Qwen)


HEADER = PUBLISHED["csv"][0]
MOONCAKE = PUBLISHED["mooncake"][0]
BAD = {
    "nothing": ((), "trace: is empty"),
    "no requests": ((HEADER,), r"trace: holds no request to replay \(0 lines skipped, 0 of"),
    "prose": (("Dear diary,",), "trace:1: column 't_s': missing from the header .a trace as a table needs t_s, input_"),
    "another JSON": (('{"a": 1}',), r"trace:1: column 'tenant': missing here \(format fairgate needs .*ts"),
    "a column missing": (("t_s,client,input_tokens",), "trace:1: column 'output_tokens': missing from the header"),
    "a field missing": ((MOONCAKE, '{"timestamp": 9, "output_length": 2, "hash_ids": []}'),
                        r"trace:2: column 'input_length': missing here \(format mooncake needs timestamp"),
    "negative": ((HEADER, "0,a,10,20", "1,a,10,-20"), "trace:3: column 'output_tokens': Expected `int` >= 0.* '-20'"),
    "negative in JSON": ((MOONCAKE.replace("20", "-20"),), "trace:1: column 'output_length': Expected `int` >= 0"),
    "not a number": ((HEADER, "0,a,ten,20"), "trace:2: column 'input_tokens': Expected `int`, got `str`, and is 'ten'"),
    "a fraction": ((MOONCAKE.replace("20", "2.5"),), "trace:1: column 'output_length': Expected `int`, got `float`"),
    "not finite": ((HEADER, "nan,a,10,20"), "trace:2: column 't_s': not a finite number"),
    "no such time": ((PUBLISHED["azure"][0], "yesterday,1,2"), "trace:2: column 'TIMESTAMP': Invalid isoformat string"),
    "unsorted": ((HEADER, "5,a,10,20", "6,a,1,2", "4,a,1,2"), "trace:4: column 't_s': 2 s too early .*: sort"),
    "logs of two days in the wrong order": ((logged(ts=90_000.0), logged(ts=5.0)), "trace:2: column 'ts': .* sort"),
    "ragged": ((HEADER, "0,a,10"), "trace:2: column 4: 3 columns where the header has 4"),
    "CSV in JSON": ((MOONCAKE, "0,a,1,2"), r"trace:2: .* \(format mooncake needs timestamp"),
    "two formats of JSON": ((MOONCAKE, logged()), "trace:2: column 'timestamp': missing here"),
    "a column twice": (("t_s,input_tokens,output_tokens,t_s", "0,1,2,3"), "trace:1: column 't_s': twice in the header"),
    "nested": ((MOONCAKE, '{"x":' + "[" * 100_000), "trace:2: maximum recursion depth"),
    "nested at once": (('{"x":' + "[" * 100_000,), r"trace: holds no request to replay"),
    "more than any prompt has": ((logged(tokens_cached=1_000_000_000),), "trace:1: column 'tokens_cached': .* <= "),
    "half a line": ((MOONCAKE, MOONCAKE[:30]), "trace:2: .*Input data was truncated"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_fault_is_named_with_file_line_and_column(tmp_path: Path, what: str) -> None:
    lines, message = BAD[what]
    path = write(tmp_path, *lines)
    if not lines:
        path.write_bytes(b"")
    with pytest.raises(TraceError, match=message):
        traced(path)


def test_a_gzip_that_was_cut_off_or_damaged_is_said_to_be(tmp_path: Path) -> None:
    rows = "".join(f"{number},a,{number * 7919 % 1000},{number * 104729 % 1000}\n" for number in range(20_000))
    packed = gzip.compress(f"{HEADER}\n{rows}".encode())
    path = tmp_path / "trace.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"trace.gz:\d{4,}: the gzip ends in the middle"):
        traced(path)
    path.write_bytes(packed[:5000] + b"\0" * 500 + packed[5500:])
    with pytest.raises(TraceError, match=r"trace.gz:\d+: (the gzip is damaged|column|.* columns|not UTF-8)"):
        traced(path)


def test_bytes_that_are_no_text_and_lines_without_end_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\x7fELF\xff\xfe\n")
    with pytest.raises(TraceError, match="trace:1: column 5: not UTF-8 text: this is not a trace"):
        traced(path)
    path.write_bytes(b"x" * (17 << 20))
    with pytest.raises(TraceError, match="trace:1: longer than 16 MiB"):
        traced(path)
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        traced(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vtc_arena27_10min.csv.gz", ("csv", 1500, 27)),
        ("azure2023_conv.csv.gz", ("csv", 19366, 1)),
        ("mooncake_fast25_synthetic.jsonl.gz", ("mooncake", 3993, 1)),
        ("lmcache_agent_sessions.jsonl.gz", ("agents", 873, 2)),
    ],
)
def test_public_traces_are_read_whole_and_in_order(name: str, found: tuple[str, int, int]) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    trace = traced(path)
    assert (trace.format, trace.requests, len(trace.demand)) == found
    times = [each.arrived_s for each in trace.arrivals(16)]
    assert times == sorted(times)
    assert (len(times), times[0], times[-1]) == (trace.requests, 0.0, pytest.approx(trace.span_s))
