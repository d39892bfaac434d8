"""A real vLLM on the CPU, once per session. Only with FAIRGATE_TEST_VLLM=1, as `make test-vllm` sets it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gateway.live import Starter

SERVE = Path(__file__).parents[2] / "deploy" / "real-vllm" / "serve.sh"
_READY_S = 180.0
_ENVIRONMENT = {**os.environ, "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""Only with it does vLLM know `previous_response_id`."""
_ENABLED = os.environ.get("FAIRGATE_TEST_VLLM") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the switch these tests are skipped, and say how to run them."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(_READY_S + 120))  # the first one starts the engine
            if not _ENABLED:
                item.add_marker(pytest.mark.skip(reason="needs a real vLLM: run `make test-vllm`"))


@pytest.fixture(scope="session")
def real_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real vLLM: model `tiny`, 255 usable blocks of 32 tokens, at most 32 running sequences."""
    venv = Path(os.environ.get("FAIRGATE_VLLM_VENV", Path.home() / ".cache" / "fairgate" / "vllm"))
    if not (venv / "bin" / "vllm").exists():
        pytest.fail(f"no vLLM in {venv}: run deploy/real-vllm/setup.sh, or set FAIRGATE_VLLM_VENV")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with serving([SERVE, str(port)], _ENVIRONMENT, port, log) as base:
        yield base


@contextmanager
def serving(command: list[str], environment: dict[str, str], port: int, log: Path) -> Iterator[str]:
    """The base URL of a vLLM that runs while the block does."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=log.parent)
    base = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, base, log)
        yield base
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.25)
    tail = log.read_text(errors="replace")[-3000:]
    pytest.fail(f"vLLM was not ready after {_READY_S:.0f} s (exit code {process.poll()}). Its log ends with:\n{tail}")


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    return Starter(tmp_path)
