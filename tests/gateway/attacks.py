"""What can one tenant hold of a gateway? Each resource at its limit, from an address of its own, and held there."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

ADDRESS = "127.0.0.3"
HOLD, FLOOD, BRIEF = "hold", "flood", "brief"
"""What an engine that helps is asked: one token and then none; tokens without end; an answer."""
LONG = HOLD + " word" * 2000
RECEIVE_BYTES = 4096
STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
NOTHING: Callable[[int], bytes] = lambda number: b""  # noqa: E731


@dataclass(frozen=True, slots=True)
class Attack:
    """`connections` that each send `first`, then `more` every `every_s`, and begin anew when they are ended."""

    connections: int
    first: Callable[[int], bytes]
    more: Callable[[int], bytes] = NOTHING
    every_s: float = 1.0
    reads: bool = True


def request(key: str, body: dict[str, object], path: str = "/v1/chat/completions", fields: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{fields}Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def chat(model: str, content: str, **fields: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "stream": True, **fields}


def attacks(
    key: str,
    model: str,
    full_model: str,
    *,
    connections: int,
    queued: int,
    bodies: int,
    readers: int,
    requests: int,
    every_s: float,
) -> dict[str, Attack]:
    """By resource. `connections` and `queued` beyond the limits; on `requests` connections one each `every_s`.

    `full_model`: of the pool whose queue is filled.
    """

    def labelled(number: int) -> bytes:
        model_named = model if number % 2 else f"model-{number}"
        body = chat(model_named, BRIEF, max_tokens=1, user=f"user-{number}", metadata={f"label-{number}": "x"})
        return request(key, body, fields=f"X-Fairgate-User: user-{number}\r\nX-Request-Id: {number}\r\n")

    def refused(number: int) -> bytes:
        bad = (
            request(key, {}), request(key, {"model": model, "messages": []}), request(key, {}, f"/v1/path-{number}"),
            request(key, chat(f"none-{number}", BRIEF)), request(key, chat(model, BRIEF, n=0)),
            f"DELETE /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode(),
        )  # fmt: skip
        return bad[number % len(bad)]

    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nA: ".encode()
    body = head + b"a\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 500_000
    asked = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    return {
        "queue": Attack(queued, lambda n: request(key, chat(full_model, LONG, user=f"user-{n}"))),
        "slow readers": Attack(readers, lambda n: request(key, chat(model, FLOOD)), reads=False),
        "beside the queue": Attack(40, lambda n: request(key, {"model": model, "prompt": HOLD}, "/tokenize")),
        "half-sent bodies": Attack(bodies, lambda n: body, lambda n: b"x" * 2000),
        "slow heads": Attack(max(1, connections // 4), lambda n: head, lambda n: b"a"),
        "label values": Attack(requests, labelled, labelled, every_s),
        "refused requests": Attack(requests, refused, refused, every_s),
        "wrong keys": Attack(requests, lambda n: request(f"no-{n}", {}), lambda n: request(f"no-{n}", {}), every_s),
        "idle connections": Attack(connections, lambda n: asked),
    }


class Attacker:
    """One tenant that holds all of what it is told to."""

    def __init__(self, port: int, again_s: float) -> None:
        """`again_s`: after this time a connection that was ended is opened again."""
        self.statuses: dict[str, Counter[int]] = {}
        """By resource, what it was answered."""
        self.open: Counter[str] = Counter()
        """By resource, the connections that have sent what they hold."""
        self.ended: Counter[str] = Counter()
        self._port = port
        self._again_s = again_s
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def holding(self, chosen: dict[str, Attack]) -> AsyncIterator[None]:
        """Hold all of these while the block runs."""
        self.statuses |= {name: Counter() for name in chosen}
        tasks = [
            asyncio.create_task(self._keep(name, one)) for name, one in chosen.items() for _ in range(one.connections)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, attack: Attack) -> None:
        while True:
            with contextlib.suppress(OSError), socket.socket() as sock:
                await self._hold(sock, name, attack, self.statuses[name])
            await asyncio.sleep(self._again_s)

    async def _hold(self, sock: socket.socket, name: str, attack: Attack, statuses: Counter[int]) -> None:
        sock.setblocking(False)
        if not attack.reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.bind((ADDRESS, 0))
        loop = asyncio.get_running_loop()
        sending: asyncio.Task[None] | None = None
        try:
            await loop.sock_connect(sock, ("127.0.0.1", self._port))
            await loop.sock_sendall(sock, attack.first(next(self._numbers)))
            self.open[name] += 1
            try:
                sending = asyncio.create_task(self._send_on(sock, attack))
                while attack.reads and (data := await loop.sock_recv(sock, 65536)):
                    answered = [int(status) for status in STATUS.findall(data)]
                    statuses.update(answered)
                    if attack.more is NOTHING and max(answered, default=0) >= 400:  # it is to be held: ask again
                        await asyncio.sleep(self._again_s)
                        await loop.sock_sendall(sock, attack.first(next(self._numbers)))
                if not attack.reads:
                    await asyncio.Event().wait()
            finally:
                self.open[name] -= 1
                self.ended[name] += 1
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.wait([sending])

    async def _send_on(self, sock: socket.socket, attack: Attack) -> None:
        loop = asyncio.get_running_loop()
        while attack.more is not NOTHING:
            await asyncio.sleep(attack.every_s)
            with contextlib.suppress(OSError):
                await loop.sock_sendall(sock, attack.more(next(self._numbers)))


def all_of(found: dict[str, Attack]) -> Iterable[tuple[str, dict[str, Attack]]]:
    """Each resource by itself, and all of them together."""
    yield from ((name, {name: one}) for name, one in found.items())
    yield "all together", found
