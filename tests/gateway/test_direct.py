"""Whatever a client sends, it gets through fairgate what it would get directly; the table says where it does not."""

from __future__ import annotations

import json

from tests.direct import DIFFERENT, ROWS, strict
from tests.gateway.capture import Peer, Seen, Upstream, answer
from tests.gateway.live import MODEL, Starter

GOOD = b'{"model":"%b","usage":{"prompt_tokens":3,"completion_tokens":1},"choices":[]}' % MODEL.encode()
WRONG = b'{"error":{"message":"wrong","type":"BadRequestError","param":null,"code":400}}'


async def script(seen: Seen, peer: Peer) -> None:
    """As vLLM does, of known length: nothing of a stream matters here."""
    status = strict(seen)
    await peer.send(answer(GOOD) if status == 200 else answer(WRONG, status=b"400 Bad Request"))


def _engine_reads(body: bytes) -> object:
    """What an engine reads, without what fairgate adds or names."""
    read = json.loads(body)
    return {name: value for name, value in read.items() if name not in ("cache_salt", "stream_options", "model")}


async def test_bodies_get_the_answers_that_they_get_directly(start: Starter) -> None:
    wrong: dict[str, object] = {}
    async with Upstream(script) as upstream, start(upstream.url) as live:
        for name, row in ROWS.items():
            body = row.named(MODEL)
            headers = {name.replace("-", "_"): value for name, value in row.headers.items()}
            sent = len(upstream.requests)
            got = await live.ask(row.path, body, **headers)
            if got.status != row.through or (got.status >= 400 and not got.error["message"]):
                wrong[name] = got
            elif row.through == 200 and _engine_reads(upstream.requests[-1].body) != _engine_reads(body):
                wrong[name] = upstream.requests[-1].body
            elif row.through == 415 and got.headers["accept-encoding"] != "identity":
                wrong[name] = got
            if name.endswith("large") and len(upstream.requests) != sent:
                wrong[name] = "an engine was asked"  # which a small one is not
        assert live.holds_nothing()
    assert not wrong


def test_the_fake_server_reads_bodies_as_the_table_says() -> None:
    """`tests/vllm` says the same of the real one."""
    for name, row in ROWS.items():
        head = "".join(f"{field}: {value}\r\n" for field, value in row.headers.items())
        assert strict(Seen(f"POST {row.path} HTTP/1.1\r\n{head}\r\n".encode(), row.body)) == row.direct, name


def test_the_table_says_all_differences() -> None:
    different = {name for name, row in ROWS.items() if row.direct != row.through}
    assert different == {*DIFFERENT, "compressed"}
