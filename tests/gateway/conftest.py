from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.certificates import Authority
from tests.gateway.live import Starter
from tests.postgres_server import Databases


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The gateway runs on uvloop in production, and so do these tests."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starter:
    """Starts a gateway from fields of its config: `async with start(url, limits={...}) as live`."""
    monkeypatch.setattr("gateway.telemetry.access_log.FLUSH_S", 0.005)  # so that nobody waits for the log
    return Starter(tmp_path)


@pytest.fixture
def quick_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways hear of keys that are made or revoked so soon that nobody waits for it."""
    monkeypatch.setattr("gateway.keys.issued.POLL_S", 0.01)


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways look so often for engines that are back or gone that nobody waits for it."""
    monkeypatch.setattr("gateway.pool.pool.PROBE_INTERVAL_S", 0.02)


@pytest.fixture(scope="session")
def databases() -> Iterator[Databases]:
    """Databases of one PostgreSQL, which is started when somebody needs the first, and stays."""
    with Databases() as made:
        yield made


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs certificates that others trust."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs certificates that nobody trusts."""
    return Authority(tmp_path_factory.mktemp("others"), "stranger")


@pytest.fixture(params=["sqlite", "postgresql"])
async def usage_url(request: pytest.FixtureRequest, tmp_path: Path, databases: Databases) -> str:
    """Where usage may be kept: what `usage` says in the config."""
    return await databases.another() if request.param == "postgresql" else str(tmp_path / "made" / "usage.db")
