"""The load generator measures what it says: checked on real sockets against replies cut in every place."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from bench.all import HEADS, PAGE, ROWS, Row, written
from bench.load import Client, Reply, Request

EVENTS = b'data: {"choices":[]}\n\ndata: {"usage":{"prompt_tokens": 31}}\n\ndata: [DONE]\n\n'
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


class Server:
    """Answers every request on a loopback port with the next of the given byte strings; an empty one hangs up."""

    def __init__(self, *answers: list[bytes]) -> None:
        self.answers = list(answers)
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while self.answers:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            for piece in self.answers.pop(0):
                if not piece:
                    writer.close()
                    return
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async def ask(self, times: int) -> list[Reply]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        replies = [await client.send(Request(words_in=3, tokens_out=2)) for _ in range(times)]
        client.close()
        server.close()
        return replies


@pytest.mark.parametrize("size", range(1, len(EVENTS)))
def test_events_are_counted_in_pieces_of_any_size(size: int) -> None:
    reply = Reply(0.0)
    reply.sse, reply.status = True, 200
    for piece in range(0, len(EVENTS), size):
        reply.feed(EVENTS[piece : piece + size], float(piece + size))
    assert (reply.events, reply.ok, reply.prompt_tokens) == (3, True, 31)
    assert reply.first_s - size < len(b"data: ") <= reply.first_s


async def test_two_streams_share_one_connection_and_are_both_whole() -> None:
    answer = SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS[:9], EVENTS[9:])
    server = Server([answer[:70], answer[70:]], [answer])
    replies = await server.ask(2)
    assert [(reply.events, reply.ok, reply.ttft_s > 0) for reply in replies] == [(3, True, True)] * 2
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}"],
        [SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS[:30])],
        [SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS)[:-5], b""],
        [SSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b'data: {"error":{}}\n\n', EVENTS)],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", b""],
        [b"no HTTP at all\r\n\r\n"],
        [b""],
    ],
    ids=["refused", "no DONE", "cut before the end", "error event", "short body", "garbage", "hung up"],
)
async def test_a_reply_that_is_not_whole_counts_as_failed(answer: list[bytes]) -> None:
    (reply,) = await Server(answer).ask(1)
    assert not reply.ok


def test_a_request_asks_for_the_lengths_it_names() -> None:
    head, _, body = (
        Request(words_in=30, tokens_out=20, key="k", user="u").encode("h", random.Random(1)).partition(b"\r\n\r\n")
    )
    fields = json.loads(body)
    assert len(fields["messages"][0]["content"].split()) == 30
    assert (fields["max_tokens"], fields["user"], fields["stream"]) == (20, "u", True)
    assert b"Authorization: Bearer k\r\n" in head
    assert f"Content-Length: {len(body)}".encode() in head


# --- the page of results ---


TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = ("gateways", "vllm", "running")


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_replaced_alone(block: str) -> None:
    begin, end = f"<!-- {block} -->\n", "<!-- end -->"
    before, _, rest = TEXT.partition(begin)
    after = rest.partition(end)[2]
    once = written(TEXT, block, "numbers")
    assert once == f"{before}{begin}\nnumbers\n\n{end}{after}"
    assert written(once, block, "numbers") == once


def test_the_page_has_each_row_in_the_form_that_is_written() -> None:
    assert f"| {' | '.join(HEADS)} |" in TEXT
    assert all(f"| {row.measure} |" in TEXT for row in ROWS)


@pytest.mark.parametrize(
    ("ours", "is_least", "met"),
    [(90.0, True, "0.9: no"), (99.0, True, "0.99: yes"), (90.0, False, "0.9: yes"), (99.0, False, "0.99: no")],
)
def test_a_row_says_whether_fairgate_keeps_its_limit(ours: float, is_least: bool, met: str) -> None:
    row = Row("measure", ("flood", "clients", "64"), "rate", limit=0.95, over="nginx", is_least=is_least)
    routes = {"nginx": {"rate": 100.0}, "fairgate": {"rate": ours}}
    bound = f"at {'least' if is_least else 'most'} 0.95 of nginx"
    assert row.cells({"flood": {"clients": {"64": routes}}}) == ["measure", "", "100", f"{ours:.0f}", bound, met]
