"""The image, made by the Dockerfile's own commands and run as compose's profile `cpu` runs it: it serves, says how it
is, can do nothing that it need not, and drains."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from tests.deploy.clients import Clients, body, said_whole
from tests.deploy.composition import Composition
from tests.deploy.conftest import COMPOSE, Images
from tests.waiting import WAIT_S

pytestmark = pytest.mark.deploy


async def test_the_image_serves_answers_its_health_check_and_drains(images: Images, tmp_path: Path) -> None:
    async with Composition(COMPOSE, "cpu", images, tmp_path, {}) as composition, aiohttp.ClientSession() as http:
        [gateway], [engine] = composition.services["gateway"], composition.services["sim"]
        await gateway.until_healthy()
        keys = dict(re.findall(r"^ +(\w+) +(fg-\S+)$", gateway.container.said, re.MULTILINE))
        url = f"http://{gateway.address}:8080"
        alice = Clients(http, url, keys["alice"])
        assert await alice.ask(stream=False) == ""
        assert await alice.ask(stream=True) == ""

        headers = {"authorization": f"Bearer {keys['alice']}"}
        stream = await http.post(f"{url}/v1/chat/completions", json=body(200, stream=True), headers=headers)
        begun = await stream.content.readany()
        assert begun
        stopping = asyncio.create_task(gateway.stop())
        rest = await stream.content.read()
        assert said_whole(begun + rest, stream=True), "a stream that runs ends in its own time"
        assert await stopping == 0
        assert "draining" in gateway.container.said

        await gateway.start()
        await gateway.until_healthy()
        await engine.stop()
        async with asyncio.timeout(WAIT_S):
            while await gateway.is_healthy():  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_the_image_may_do_nothing_that_it_need_not(images: Images, tmp_path: Path) -> None:
    async with Composition(COMPOSE, "cpu", images, tmp_path, {}) as composition:
        [gateway] = composition.services["gateway"]
        await gateway.until_healthy()
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{gateway.container.pid}/status").read_text().splitlines()  # noqa: ASYNC240
            if ":\t" in line
        )
        assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
        assert status["Groups"].split() == []
        assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        for path in ("/x", "/opt/fairgate/x", "/etc/fairgate/config.yaml"):
            said = (await gateway.container.execute(["sh", "-c", f": >> {path}"]))[1]
            assert "Read-only file system" in said or "Permission denied" in said, (path, said)
        assert (await gateway.container.execute(["sh", "-c", "rm -r /opt/fairgate || : > /tmp/x && cat /tmp/x"]))[
            0
        ] == 0
        code = "import policies.admission.engine as e; print(e.__file__)"
        said = (await gateway.container.execute(["python", "-c", code]))[1]
        assert said.strip().endswith(".so"), "the gateway is compiled"
