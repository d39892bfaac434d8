"""Few open files are allowed: whoever takes many connections leaves room for others, and the log says what is to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.commands import running
from tests.gateway.capture import Upstream
from tests.kit.served import Streams, config_file

FILES_MAX = 200
FEW_FILES = ("sh", "-c", f'ulimit -n {FILES_MAX}; exec "$@"', "sh")


async def test_an_address_with_more_connections_than_files_shuts_nobody_out(tmp_path: Path) -> None:
    workers = 2
    async with Upstream(Streams()) as upstream:
        file = config_file(tmp_path, upstream.url, workers=workers)
        async with running("serve", "-c", file, by=FEW_FILES) as command:
            port = int((await command.says(r"serving on http://[^:]+:(\d+)"))[1])
            key = (await command.says(r"alice +(fg-\S+)"))[1]
            await command.says(r"limits.connections_max is \d+, and the limit of open files \(ulimit -n\) allows 68")
            taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(workers * (FILES_MAX + 30))]
            assert b"too_many_at_once" in await taken[-1][0].read()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            for _, each in (*taken, (reader, writer)):
                each.close()
