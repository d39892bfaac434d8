"""The table of what bodies get directly, asked of a real vLLM and of the gateway before it; and forms, which no model
here takes, as the Starlette beside it reads them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

import aiohttp

from gateway.request.apis import AUDIO
from gateway.request.body.form import read_form
from tests.direct import ROWS, Row
from tests.gateway.live import Starter
from tests.kit.forms import LEGAL

TINY = "tiny"
STARLETTE = Path(__file__).with_name("starlette_forms.py")


async def _status(http: aiohttp.ClientSession, url: str, row: Row, **headers: str) -> int:
    async with http.post(url + row.path, data=row.named(TINY), headers={**row.headers, **headers}) as response:
        await response.read()
        return response.status


async def test_bodies_get_the_answers_of_the_table(real_vllm: str, tmp_path: Path) -> None:
    wrong: dict[str, object] = {}
    async with Starter(tmp_path)(real_vllm) as live, aiohttp.ClientSession() as http:
        for name, row in ROWS.items():
            got = await _status(http, real_vllm, row), await _status(http, live.url, row, authorization="Bearer k")
            if got != (row.direct, row.through):
                wrong[name] = got
    assert not wrong


def test_starlette_reads_the_forms_that_are_legal() -> None:
    python = Path(os.environ.get("FAIRGATE_VLLM_VENV", Path.home() / ".cache" / "fairgate" / "vllm")) / "bin" / "python"
    forms = [[label, base64.b64encode(body).decode()] for label, body in LEGAL.values()]
    done = subprocess.run([python, STARLETTE], input=json.dumps(forms), capture_output=True, text=True, check=True)
    for (label, body), read in zip(LEGAL.values(), json.loads(done.stdout), strict=True):
        payload = read_form(body, label.encode(), AUDIO)
        assert [payload.model, payload.stream] == [read["model"], read.get("stream") == "true"], label
