"""What is deployed, run as it is deployed. What takes minutes and root only with FAIRGATE_TEST_DEPLOY=1, as
`make test-deploy` sets it: debootstrap makes three Debians from the network, and the gateway is compiled."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.composition import COMPOSE
from tests.deploy.container import Image
from tests.deploy.dockerfile import built
from tests.deploy.stand_ins import StandIns

ROOT = Path(__file__).parents[2]
BUILD_S = 2400.0
_ENABLED = os.environ.get("FAIRGATE_TEST_DEPLOY") == "1"
_PROGRAMS = ("debootstrap", "unshare", "nsenter", "setpriv", "ip", "curl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the switch these tests are skipped, and say how to run them."""
    for item in items:
        if item.get_closest_marker("deploy"):
            item.add_marker(pytest.mark.timeout(BUILD_S))  # the first one builds the image
            if not _ENABLED:
                item.add_marker(pytest.mark.skip(reason="builds the image, as root: run `make test-deploy`"))


@pytest.fixture(scope="session")
def stand_ins() -> StandIns:
    """Debian in the place of what a registry has."""
    if os.geteuid() or (missing := [name for name in _PROGRAMS if shutil.which(name) is None]):
        pytest.fail(f"needs root, and {', '.join(_PROGRAMS)}" + ("" if os.geteuid() else f"; missing: {missing}"))
    kept = Path(os.environ.get("FAIRGATE_DEBIAN", Path.home() / ".cache" / "fairgate" / "debian"))
    kept.mkdir(parents=True, exist_ok=True)
    return StandIns(yaml.safe_load(COMPOSE.read_text())["x-images"], kept)


@pytest.fixture(scope="session")
def image(stand_ins: StandIns) -> Iterator[Image]:
    """The gateway's image, as the Dockerfile makes it from what stands for those of others."""
    names = yaml.safe_load(COMPOSE.read_text())["x-images"]
    where = Path(tempfile.mkdtemp(prefix="fairgate-image-"))
    try:
        arguments = {"BUILD_IMAGE": names["build"], "RUN_IMAGE": names["python"]}
        yield asyncio.run(built(ROOT / "deploy/Dockerfile", ROOT, arguments, stand_ins.copy, where))
    finally:
        # Whatever was mounted there was so in namespaces that have ended.
        subprocess.run(["rm", "-rf", "--one-file-system", where], check=False)
