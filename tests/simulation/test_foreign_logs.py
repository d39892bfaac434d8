"""What docs/replay.md does with logs of others is run here: nobody needs fairgate to see what it would bring."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import FAIRGATE
from tests.postgres_server import PostgresServer, program

PAGE = (Path(__file__).parents[2] / "docs/replay.md").read_text()
TABLE = """\
CREATE TABLE "LiteLLM_SpendLogs" (request_id text PRIMARY KEY, api_key text NOT NULL DEFAULT '',
  prompt_tokens int NOT NULL DEFAULT 0, completion_tokens int NOT NULL DEFAULT 0, "startTime" timestamp NOT NULL,
  "user" text DEFAULT '', team_id text);
INSERT INTO "LiteLLM_SpendLogs" SELECT n::text, 'key', 100, 20, now() AT TIME ZONE 'UTC' - n * interval '1 s', '',
  CASE WHEN n % 3 = 0 THEN 'search' ELSE 'chat' END FROM generate_series(1, 9) AS n;
"""
"""The columns of LiteLLM's schema that matter here, by its types."""


def shown(beginning: str) -> str:
    """The command of the page that begins so."""
    [found] = re.findall(rf"^```sh\n({re.escape(beginning)}.*?)^```$", PAGE, re.M | re.S)
    return str(found)


def run(command: str, where: Path, **variables: str) -> str:
    path = f"{Path(FAIRGATE).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=where,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def span(number: int, name: str, **counts: int) -> dict[str, object]:
    attributes = [{"key": f"gen_ai.usage.{key}", "value": {"intValue": str(value)}} for key, value in counts.items()]
    attributes.append({"key": "gen_ai.request.id", "value": {"stringValue": f"cmpl-{number}"}})
    return {
        "name": name,
        "startTimeUnixNano": str(1_790_000_000_000_000_000 - number * 10**9),
        "attributes": attributes,
    }


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_spans_of_vllm_are_replayed(tmp_path: Path) -> None:
    spans = [span(n, "llm_request", prompt_tokens=100, completion_tokens=20) for n in range(4)] + [span(9, "other")]
    lines = [{"resourceSpans": [{"scopeSpans": [{"spans": spans[at : at + 2]}]}]} for at in (0, 2, 4)]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = run(shown("(echo t_s"), tmp_path)
    assert "4 requests of 1 tenant in 3.0 s (csv format)" in out


async def test_the_database_of_litellm_is_replayed(tmp_path: Path) -> None:
    async with PostgresServer() as server:
        await asyncio.to_thread(
            run, f"{program('psql')} \"$DATABASE_URL\" <<'END'\n{TABLE}END", tmp_path, DATABASE_URL=server.url
        )
        out = await asyncio.to_thread(run, shown("psql"), tmp_path, DATABASE_URL=server.url)
    assert "9 requests of 2 tenants in 8.0 s (csv format)" in out
