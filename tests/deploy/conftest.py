"""What is deployed, run as it is deployed. What takes minutes and root only with FAIRGATE_TEST_DEPLOY=1, as
`make test-deploy` sets it: debootstrap makes two Debians from the network, and the gateway is compiled."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.debian import WITH_COMPILER, debian
from tests.deploy.dockerfile import built

BUILD_S = 2400.0
_ENABLED = os.environ.get("FAIRGATE_TEST_DEPLOY") == "1"
_PROGRAMS = ("debootstrap", "unshare", "nsenter", "ip", "curl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the switch these tests are skipped, and say how to run them."""
    for item in items:
        if item.get_closest_marker("deploy"):
            item.add_marker(pytest.mark.timeout(BUILD_S))  # the first one builds what the image holds
            if not _ENABLED:
                item.add_marker(pytest.mark.skip(reason="builds the image, as root: run `make test-deploy`"))


@pytest.fixture(scope="session")
def debians() -> Path:
    """Where bare Debians are kept."""
    if os.geteuid() or (missing := [name for name in _PROGRAMS if shutil.which(name) is None]):
        pytest.fail(f"needs root, and {', '.join(_PROGRAMS)}" + ("" if os.geteuid() else f"; missing: {missing}"))
    kept = Path(os.environ.get("FAIRGATE_DEBIAN", Path.home() / ".cache" / "fairgate" / "debian"))
    kept.mkdir(parents=True, exist_ok=True)
    return kept


@pytest.fixture(scope="session")
def fairgate(debians: Path) -> Iterator[Path]:
    """What the image has in /opt/fairgate, as the Dockerfile makes it."""
    where = Path(tempfile.mkdtemp(prefix="fairgate-image-"))
    try:
        asyncio.run(debian(WITH_COMPILER, debians, where / "build"))
        asyncio.run(built(where / "build"))
        yield where / "build/opt/fairgate"
    finally:
        # Whatever was mounted there was so in namespaces that have ended.
        subprocess.run(["rm", "-rf", "--one-file-system", where], check=False)
