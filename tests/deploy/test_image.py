"""The image, made by the Dockerfile's own commands and run as compose's profile `cpu` runs it: it serves, says how it
is, can do nothing that it need not, and drains."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.deploy.composition import Service, network
from tests.deploy.container import Image
from tests.deploy.requests import by_curl, said_whole
from tests.waiting import eventually, until

pytestmark = pytest.mark.deploy


@pytest.fixture
async def cpu(image: Image, tmp_path: Path) -> AsyncIterator[tuple[Service, Service, str]]:
    """The gateway and the engine of the profile, and their network."""
    async with network() as namespace:
        gateway, engine = (Service(name, image, tmp_path, namespace) for name in ("gateway", "sim"))
        try:
            await engine.start()
            await gateway.start()
            await eventually(gateway.is_healthy)
            yield gateway, engine, namespace
        finally:
            await gateway.remove()
            await engine.remove()


async def test_the_image_serves_answers_its_health_check_and_drains(cpu: tuple[Service, Service, str]) -> None:
    gateway, engine, namespace = cpu
    await until(lambda: "in Python" in gateway.said)  # it is healthy before it says all of this
    [key] = re.findall(r"^ +alice +(fg-\S+)$", gateway.said, re.MULTILINE)

    async def asking(tokens: int, *, stream: bool) -> asyncio.subprocess.Process:
        command = ["ip", "netns", "exec", namespace, *by_curl(key, tokens, stream=stream)]
        return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)

    for stream in (False, True):
        answer, _ = await (await asking(32, stream=stream)).communicate()
        assert said_whole(answer, stream=stream)

    long = await asking(200, stream=True)
    assert long.stdout is not None
    begun = await long.stdout.readline()
    assert begun
    stopping = asyncio.create_task(gateway.stop())
    rest, _ = await long.communicate()
    assert said_whole(begun + rest, stream=True), "a stream that runs ends in its own time"
    assert await stopping == 0
    assert "draining" in gateway.said

    await gateway.start()
    await eventually(gateway.is_healthy)
    await engine.stop()

    async def is_unwell() -> bool:
        return not await gateway.is_healthy()

    await eventually(is_unwell)


async def test_the_image_may_do_nothing_that_it_need_not(cpu: tuple[Service, Service, str]) -> None:
    gateway, _, _ = cpu
    lines = Path(f"/proc/{gateway.pid}/status").read_text().splitlines()  # noqa: ASYNC240
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
    assert status["Groups"].split() == []
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    for path in ("/x", "/opt/fairgate/x", "/etc/fairgate/config.yaml"):
        said = (await gateway.execute(["sh", "-c", f": >> {path}"]))[1]
        assert "Read-only file system" in said or "Permission denied" in said, (path, said)
    assert (await gateway.execute(["sh", "-c", "rm -r /opt/fairgate || : > /tmp/x && cat /tmp/x"]))[0] == 0
    code = "import policies.admission.engine as e; print(e.__file__)"
    said = (await gateway.execute(["python", "-c", code]))[1]
    assert said.strip().endswith(".so"), "the gateway is compiled"
