"""What was sent is what arrives, but for the documented edits: at any engine, under any policy, at any placement.

So a client gets through fairgate what it would get directly; the table of `tests/direct.py` says where it does not.
"""

from __future__ import annotations

import json
import random
from itertools import product

import pytest

from gateway.config.sections.keys import hash_key
from gateway.pool.backend import salt_of
from policies.orders.policy_entries import POLICIES
from policies.placements.placement_entries import PLACEMENTS
from tests.direct import DIFFERENT, ROWS, strict
from tests.gateway.capture import OK, Peer, Seen, Upstream, answer, replies
from tests.gateway.live import MODEL, Starter
from tests.kit.forms import AUDIO, CHAT, COMPLETIONS, END, FORM, MESSAGES, part
from tests.kit.together import together

TENANTS = [{"name": name, "keys": [hash_key(name)]} for name in ("alice", "bob")]
ENGINES = ["vllm", "openai vllm", "vllm vllm openai"]
COMBINATIONS = [
    *product(POLICIES, ("least_loaded",), ENGINES[:1], (False,)),
    *product(("fairserve",), PLACEMENTS, ENGINES[1:], (False, True)),
]
CLIP = random.Random(7).randbytes(3000)
LARGE = random.Random(8).randbytes(300_000)
LONG = b'"prompt":"%b"' % (b"{ long " * 50_000)


def upload(clip: bytes) -> bytes:
    """A form with these bytes as its file."""
    return part("model", "simulated") + part("file", "|", '; filename="a"').replace(b"|", clip) + END


SENT: dict[str, tuple[str, bytes]] = {
    "random bytes": (AUDIO, upload(CLIP)),
    "no brace": (AUDIO, upload(CLIP.replace(b"{", b"["))),
    "a brace first": (AUDIO, upload(b'{"model":"x"}' + CLIP)),
    "a large one": (AUDIO, upload(LARGE)),
    "a large one without a brace": (AUDIO, upload(LARGE.replace(b"{", b"["))),
    "line ends": (AUDIO, upload(b"\n\n\r\r\n--y\r\n\r\n--\r\n{\r\n\n")),
    "an empty file": (AUDIO, upload(b"")),
    "streamed form": (AUDIO, part("stream", "true") + upload(CLIP)),
    "no part": (AUDIO, END),
    "form to a path of the config": ("/v1/unheard-of", upload(CLIP)),
    "JSON": (CHAT, b'{"model":"simulated","messages":[{"role":"user","content":"{\\u007b \xc3\xa4"}]}'),
    "spaces": (COMPLETIONS, b' \r\n{\n "n" : 1,\r\n\t"prompt" : "{" ,"seed":1.50}\n'),
    "large JSON": (COMPLETIONS, b'\n{ "seed": 1.50, %b }\n' % LONG),
    "large messages": (MESSAGES, b'{"stream":true,%b}' % LONG),
    "no prompt that is known": (COMPLETIONS, b'{"prompt_embeds":"AAAA"}'),
    "no field": (CHAT, b"{ }"),
    "one pass": ("/v1/embeddings", b'{"input":["{"]}'),
    "beside the queue": ("/tokenize", b'{"prompt":"{"}'),
}
EDITED: dict[str, tuple[str, bytes, bytes]] = {
    "steered": (CHAT, b'{"cache_salt":"mine","messages":[],"cache\\u005fsalt":"too"}', b'{"messages":[]}'),
    "large and steered": (COMPLETIONS, b'{"cache_salt":"mine",%b,"cache_salt":1}' % LONG, b"{%b}" % LONG),
    "steering form": (AUDIO, part("cache_salt", "mine") + upload(CLIP), upload(CLIP)),
    "streamed": (
        COMPLETIONS,
        b'{"prompt":"","stream":true}',
        b'{"stream_options":{"include_usage":true},"prompt":"","stream":true}',
    ),
    "large and streamed": (
        COMPLETIONS,
        b'{"stream":true,%b}' % LONG,
        b'{"stream_options":{"include_usage":true},"stream":true,%b}' % LONG,
    ),
    "renamed": (CHAT, b'{"model":"alias","messages":[]}', b'{"model":"simulated","messages":[]}'),
    "renamed form": (AUDIO, upload(CLIP).replace(b"simulated", b"alias"), upload(CLIP)),
}
USAGE = b'"stream_options":{"include_usage":true},'


def named(path: str, body: bytes) -> bytes:
    """JSON with the model that answers, where the client names none and the request waits for an engine."""
    if body.startswith(b"--") or b'"model"' in body or path == "/tokenize":
        return body
    begun, _, rest = body.partition(b"{")
    usage = USAGE if rest.startswith(USAGE) else b""
    rest = rest.removeprefix(usage)
    return begun + b"{" + usage + b'"model":"simulated"' + b"," * (rest.strip() != b"}") + rest


BODIES = {
    name: (path, sent, named(path, arrives))
    for name, (path, sent, arrives) in ({name: (*one, one[1]) for name, one in SENT.items()} | EDITED).items()
}


def salted(body: bytes, tenant: str) -> bytes:
    """JSON as it arrives where tenants are kept apart; a form as it is."""
    if body.startswith(b"--") or b'"' not in body:
        return body
    return body.replace(b"{", b'{"cache_salt":"%b",' % salt_of(tenant).encode(), 1)


@pytest.mark.parametrize(("policy", "placement", "engines", "shared"), COMBINATIONS)
async def test_what_was_sent_arrives(start: Starter, policy: str, placement: str, engines: str, shared: bool) -> None:
    wide = [Upstream(replies(OK), context_tokens=1 << 20) for _ in engines.split()]
    async with together(wide) as upstreams:
        backends = [{"url": each.url, "engine": kind} for each, kind in zip(upstreams, engines.split(), strict=True)]
        isolated = "never" if shared else "where_possible"
        running = start(
            pools=[{"name": "p", "models": ["simulated"], "backends": backends, "isolate_caches": isolated}],
            policy={"name": policy, "placement": placement},
            tenants=TENANTS,
            aliases={"alias": "simulated"},
            routes=[{"path": "/v1/unheard-of", "treatment": "generate"}],
        )
        async with running as live:
            pool = live.gateway.pools[0]
            for kind, upstream in zip(engines.split(), upstreams, strict=True):
                for backend in pool.backends.values():
                    pool.drain(backend, backend.url != upstream.url)
                for number, (name, (path, sent, arrives)) in enumerate(BODIES.items()):
                    tenant = ("alice", "bob")[number % 2]
                    label = FORM if sent.startswith(b"--") else "application/json"
                    got = await live.ask(path, sent, key=tenant, content_type=label)
                    assert got.status == 200, (name, got.body)
                    [seen] = upstream.requests
                    upstream.requests.clear()
                    is_salted = kind == "vllm" and not shared
                    assert seen.body == (salted(arrives, tenant) if is_salted else arrives), (name, kind)


@pytest.mark.parametrize("engines", [("vllm", "openai"), ("openai", "vllm")])
@pytest.mark.parametrize("name", ["JSON", "large JSON", "random bytes"])
async def test_each_engine_that_is_tried_gets_its_own(start: Starter, engines: tuple[str, ...], name: str) -> None:
    async def goes_away(seen: Seen, peer: Peer) -> None:
        peer.reset()

    path, sent, arrives = BODIES[name]
    wide = 1 << 20
    async with (
        Upstream(goes_away, context_tokens=wide) as first,
        Upstream(replies(OK), context_tokens=wide) as second,
    ):
        urls = {"a": first.url, "b": second.url}
        backends = [{"name": each, "url": urls[each], "engine": kind} for each, kind in zip(urls, engines, strict=True)]
        pools = [{"name": "p", "models": ["simulated"], "backends": backends}]
        async with start(pools=pools, tenants=TENANTS, policy={"name": "vtc", "placement": "least_loaded"}) as live:
            label = FORM if path == AUDIO else "application/json"
            assert (await live.ask(path, sent, key="bob", content_type=label)).status == 200
            arrived = [upstream.requests[-1].body for upstream in (first, second)]
            assert arrived == [salted(arrives, "bob") if kind == "vllm" else arrives for kind in engines]


# --- directly and through the gateway ---

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
    assert not wrong


def test_the_fake_server_reads_bodies_as_the_table_says() -> None:
    """`tests/vllm` says the same of the real one."""
    for name, row in ROWS.items():
        head = "".join(f"{field}: {value}\r\n" for field, value in row.headers.items())
        assert strict(Seen(f"POST {row.path} HTTP/1.1\r\n{head}\r\n".encode(), row.body)) == row.direct, name


def test_the_table_says_all_differences() -> None:
    different = {name for name, row in ROWS.items() if row.direct != row.through}
    assert different == {*DIFFERENT, "compressed"}
