"""Sockets that systemd passes: an upgrade refuses nobody, and a socket that cannot be used is named."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.process.systemd import inherited_listeners
from tests.commands import Running, running
from tests.gateway.capture import Upstream
from tests.kit.served import Streams, config_file, status_of_one

PASS_ON = """
import os, sys
for to, descriptor in enumerate(sys.argv[2].split(","), 3):
    os.dup2(int(descriptor), to)
count = sys.argv[2].count(",") + 1
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": sys.argv[1]}
os.execv(sys.argv[3], sys.argv[3:])
"""
"""What systemd does between fork and exec: sd_listen_fds(3)."""
NOWHERE = "http://127.0.0.1:9"
FREE_DESCRIPTOR_LEAST = 10
"""Above the numbers that the gateway expects, so that none is overwritten on the way."""


def activated_config(folder: Path, engine: str, workers: int = 1) -> str:
    # A gateway that opened the sockets itself would fail: this machine does not have the address.
    return config_file(
        folder, engine, listen="192.0.2.1:1", admin="192.0.2.1:2", admin_token="of-some-length",
        workers=workers, open_access=True, access_log="off", tenants=[],
    )  # fmt: skip


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def activated(config: str, listeners: dict[str, socket.socket], notified: str = "") -> AsyncIterator[Running]:
    """A gateway as systemd starts it, with these sockets by name; it reports to the socket at `notified`."""
    descriptors = [fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, FREE_DESCRIPTOR_LEAST) for each in listeners.values()]
    by = ["env", f"NOTIFY_SOCKET={notified}", sys.executable, "-c", PASS_ON, ":".join(listeners)]
    by.append(",".join(map(str, descriptors)))
    try:
        async with running("serve", "-c", config, by=tuple(by), descriptors=tuple(descriptors)) as gateway:
            yield gateway
    finally:
        for each in descriptors:
            os.close(each)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_an_upgrade_refuses_nobody(workers: int, tmp_path: Path) -> None:
    answers: list[int] = []
    upgraded = asyncio.Event()
    async with Upstream(Streams()) as engine, aiohttp.ClientSession() as session:
        config = activated_config(tmp_path, engine.url, workers)
        with listening() as clients, listening() as operator:
            listeners = {"http": clients, "admin": operator}
            # A connection that comes before any gateway waits for the first one.
            early = asyncio.create_task(status_of_one(url_of(clients), max_tokens=3))
            async with activated(config, listeners) as old:

                async def keep_asking() -> None:
                    while not upgraded.is_set():
                        answers.append(await status_of_one(url_of(clients), max_tokens=3))

                await old.says("serving on")
                assert await early == 200
                asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
                async with activated(config, listeners) as new:
                    await new.says("serving on" if workers == 1 else "worker 1 serves")
                    old.signal(signal.SIGTERM)
                    assert await old.ended() == 0
                    served_by_both = len(answers)
                    # The new gateway answers alone, on both listeners.
                    assert await status_of_one(url_of(clients), max_tokens=3) == 200
                    async with session.get(f"{url_of(operator)}/health") as health:
                        assert health.status == 200
                    upgraded.set()
                    await asyncio.gather(*asking)
                    assert len(answers) > served_by_both > 0
        assert set(answers) == {200}


async def test_systemd_is_told_when_the_gateway_serves_and_when_it_drains(tmp_path: Path) -> None:
    reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    reports.setblocking(False)
    with reports, listening() as clients, listening() as operator:
        reports.bind(str(tmp_path / "notify"))
        listeners = {"http": clients, "admin": operator}
        async with activated(activated_config(tmp_path, NOWHERE), listeners, str(tmp_path / "notify")) as gateway:
            loop = asyncio.get_running_loop()
            assert await loop.sock_recv(reports, 100) == b"READY=1"
            gateway.signal(signal.SIGTERM)
            assert await loop.sock_recv(reports, 100) == b"STOPPING=1"
            assert await gateway.ended() == 0


async def test_a_socket_without_a_known_name_is_named_and_those_of_another_process_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening() as clients:
        async with activated(activated_config(tmp_path, NOWHERE), {"fairgate.socket": clients}) as gateway:
            assert await gateway.ended() == 1
            assert "'fairgate.socket'" in gateway.said
            assert "FileDescriptorName=http" in gateway.said
            assert "Traceback" not in gateway.said
    for name, value in (("FDS", "1"), ("FDNAMES", "http"), ("PID", str(os.getpid() + 1))):
        monkeypatch.setenv(f"LISTEN_{name}", value)
    assert inherited_listeners() == {}
