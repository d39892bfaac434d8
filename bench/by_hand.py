"""What does that which is written by hand gain over a library that does it? The table of docs/decisions/by-hand.md.

    pip install orjson httpx-sse python-multipart      what it is compared with; none of it is ours to depend on
    python -m bench.by_hand

CPU time of one thread, the shortest of many runs, and each beside the other: the two take turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import orjson
from httpx_sse._decoders import SSEDecoder
from prometheus_client.parser import text_string_to_metric_families
from python_multipart.multipart import create_form_parser
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from backends.answers.body import decode_event
from backends.answers.sse import Dialect, StreamMeter
from backends.promtext import lines_of, samples
from bench import report
from gateway.request.apis import AUDIO
from gateway.request.body.form import read_form
from gateway.request.body.payload import fields_of
from gateway.request.prompt import Prompt, TokenEstimator
from gateway.storage.redis.redis_connection import RedisConnection
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[1]
RUN_S = 0.3
TURNS = 7

Work = Callable[[], object]


def shortest_us(*works: Work) -> list[float]:
    """CPU time of one call of each."""
    best = [float("inf")] * len(works)
    for _ in range(TURNS):
        for number, work in enumerate(works):
            calls, began_s = 0, time.thread_time()
            while (took_s := time.thread_time() - began_s) < RUN_S / TURNS or not calls:
                work()
                calls += 1
            best[number] = min(best[number], took_s / calls)
    return [1e6 * each for each in best]


def request(size: int) -> tuple[Work, ...]:
    """The few fields of a request that matter, its prompt unparsed."""
    text = "A sentence of some words. " * (size // 26)
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}).encode()
    return (lambda: fields_of(body)), (lambda: orjson.loads(body)), (lambda: json.loads(body))


EVENT = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1795279044,
        "model": "llama-3.1-8b",
        "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
    },
    separators=(",", ":"),
).encode()


def event() -> tuple[Work, ...]:
    return (lambda: decode_event(EVENT)), (lambda: orjson.loads(EVENT)), (lambda: json.loads(EVENT))


def stream() -> tuple[Work, ...]:
    """A token's event, counted as it passes."""
    meter = StreamMeter(Dialect.OPENAI, strip_usage=False)
    chunk = b"data: " + EVENT + b"\n\n"
    decoder = SSEDecoder()

    def library() -> int:
        tokens = 0
        for line in chunk.decode().split("\n"):
            found = decoder.decode(line)
            if found is not None:
                tokens += bool(orjson.loads(found.data)["choices"][0]["delta"].get("content"))
        return tokens

    return (lambda: meter.feed(chunk)), library


def page() -> tuple[Work, ...]:
    """The gauges of an engine's page."""
    text = (ROOT / "tests/backends/fixtures/vllm-0.32-single.txt").read_text()
    lines = lines_of(["vllm_num_requests_running", "vllm_num_requests_waiting", "vllm_kv_cache_usage_perc"])
    return (lambda: samples(text, lines)), (lambda: list(text_string_to_metric_families(text)))


def form() -> tuple[Work, ...]:
    """A form with a clip of 1 MB."""
    file = bytes(range(256)) * 4096
    head = b'--x\r\ncontent-disposition: form-data; name="%s"\r\n\r\n'
    clip = b'--x\r\ncontent-disposition: form-data; name="file"; filename="clip.wav"\r\n\r\n'
    body = head % b"model" + b"whisper\r\n" + clip + file + b"\r\n--x--\r\n"
    kind = Message()
    kind["content-type"] = "multipart/form-data; boundary=x"

    def library() -> None:
        headers = {"Content-Type": b"multipart/form-data; boundary=x", "Content-Length": str(len(body)).encode()}
        parser = create_form_parser(headers, lambda field: None, lambda file: None)
        parser.write(body)
        parser.finalize()

    return (lambda: read_form(body, b"multipart/form-data; boundary=x", AUDIO)), library


def tokens() -> tuple[Work, ...]:
    """A prompt of 4 kB of English."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    text = (ROOT / "ARCHITECTURE.md").read_text()
    trainer = trainers.BpeTrainer(vocab_size=8000, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    prompt, estimator = Prompt(text[:4096].encode()), TokenEstimator()
    return (lambda: estimator.estimate(prompt)), (lambda: tokenizer.encode(text[:4096]))


CASES: tuple[tuple[str, tuple[str, ...], Callable[[], tuple[Work, ...]]], ...] = (
    ("fields of a request, 1 kB", ("msgspec", "orjson", "json"), lambda: request(1024)),
    ("fields of a request, 64 kB", ("msgspec", "orjson", "json"), lambda: request(65536)),
    ("an event of a stream", ("msgspec", "orjson", "json"), event),
    ("a token counted in a stream", ("backends/answers/sse.py", "httpx-sse with orjson"), stream),
    ("gauges of an engine's page", ("backends/promtext.py", "prometheus_client.parser"), page),
    ("a form with 1 MB", ("gateway/request/body/form.py", "python-multipart"), form),
    ("tokens of a prompt of 4 kB", ("gateway/request/prompt.py", "tokenizers"), tokens),
)


async def commands() -> list[float]:
    """Time commands to Redis and their answers, one after the other as an exchange sends them."""
    async with RedisServer() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        lane, client = RedisConnection(url, url), Redis.from_url(url)
        best = [float("inf"), float("inf")]
        for _ in range(2 * TURNS):
            for number, ask in enumerate((lane.ask, client.execute_command)):
                began_s = time.thread_time()
                for _ in range(300):
                    await ask("SET", "key", b"value")
                best[number] = min(best[number], (time.thread_time() - began_s) / 300)
        await lane.close()
        await client.aclose()
    return [1e6 * each for each in best]


def main() -> None:
    rows = []
    for case, ways, made in CASES:
        took_us = shortest_us(*made())
        rows += [[case, way, f"{us:,.2f} us", f"{us / took_us[0]:.2f}"] for way, us in zip(ways, took_us, strict=True)]
    both = asyncio.run(commands())
    for way, us in zip(("gateway/storage/redis/redis_connection.py", "redis.asyncio.Redis"), both, strict=True):
        rows.append(["a command to Redis", way, f"{us:,.2f} us", f"{us / both[0]:.2f}"])
    print(report.table(["what", "way", "CPU", "times the first"], rows))


if __name__ == "__main__":
    main()
