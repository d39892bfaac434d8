"""What is installed from a wheel serves, from whatever directory; what a distribution holds.

A wheel is installed by uv here, which takes seconds. By every tool, and compiled, with `make test-install`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from gateway import __version__
from tests.commands import running
from tests.install.installing import (
    COMPILE,
    PACKAGES,
    TOOLS,
    away,
    built,
    environment,
    installed,
    misleading,
)
from tests.kit.served import status_of_one

DIST = os.environ.get("FAIRGATE_TEST_WHEELS")
SERVE = ("serve", "--backend", "sim:demo", "--port", "0", "--admin-port", "0")


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("pure"))


def wheel(build: str) -> Path:
    """The one that `make wheel` has built so."""
    [found] = [
        path for path in Path(DIST or "").glob("*.whl") if ("-none-any" in path.name) == (build == "interpreted")
    ]
    return found


def ran(fairgate: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([fairgate, *arguments], cwd=where, env=environment(), capture_output=True, text=True)


def version(fairgate: Path, where: Path) -> str:
    return ran(fairgate, where, "--version").stdout.strip()


async def serves(fairgate: Path, where: Path, *arguments: str) -> bool:
    """Does a gateway that is started in this directory answer?"""
    async with running(*arguments, by=away(where), program=str(fairgate)) as gateway:
        url = await gateway.says(r"serving on (http://[^ ,]+)")
        return await status_of_one(url[1], stream=True, max_tokens=4) == 200


async def test_an_installed_wheel_serves_from_any_directory(pure: Path, tmp_path: Path) -> None:
    fairgate, where = installed("uv", pure, tmp_path), misleading(tmp_path / "elsewhere")
    assert await serves(fairgate, where, *SERVE)
    assert version(fairgate, where) == f"fairgate {__version__}, interpreted"
    async with running("sim", "--port", "0", by=away(where), program=str(fairgate)) as engine:
        url = await engine.says(r"(http://127\.0\.0\.1:\d+)")
        assert await serves(fairgate, where, *SERVE[:2], url[1], *SERVE[3:], "--workers", "2")


@pytest.mark.wheels
@pytest.mark.skipif(DIST is None, reason="takes minutes, most of them compiling: run `make test-install`")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("build", ["interpreted", "compiled"])
async def test_each_tool_installs_each_wheel(tool: str, build: str, tmp_path: Path) -> None:
    started_s = time.monotonic()
    fairgate = installed(tool, wheel(build), tmp_path)
    assert await serves(fairgate, misleading(tmp_path / "elsewhere"), *SERVE)
    print(f"{tool}, {build}: {time.monotonic() - started_s:.1f} s from an empty environment to the first answer")
    assert version(fairgate, tmp_path) == f"fairgate {__version__}, {build}"


@pytest.mark.wheels
@pytest.mark.timeout(1600)
@pytest.mark.skipif(DIST is None, reason="takes minutes, most of them compiling: run `make test-install`")
@pytest.mark.parametrize(("build", "asked"), [("interpreted", {}), ("compiled", COMPILE)])
def test_the_sources_are_compiled_where_that_is_asked_for(build: str, asked: dict[str, str], tmp_path: Path) -> None:
    [sources] = Path(DIST or "").glob("*.tar.gz")
    assert version(installed("uv", sources, tmp_path, **asked), tmp_path) == f"fairgate {__version__}, {build}"


def test_a_wheel_holds_our_packages_and_its_licence(pure: Path) -> None:
    names = zipfile.ZipFile(pure).namelist()
    about = f"fairgate-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, about}
    assert f"{about}/licenses/LICENSE" in names
    scripts = {"gateway/storage/redis/exchange.lua", "gateway/storage/hub/redis_commands.lua"}
    assert scripts | {"gateway/operator/page/index.html"} <= {*names}
    assert f"fairgate-{__version__}-py3-none-any.whl" == pure.name


def test_the_sources_hold_what_builds_them(tmp_path: Path) -> None:
    archive = built(tmp_path, target="sdist")
    names = {name.partition("/")[2] for name in tarfile.open(archive).getnames()}
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "CHANGELOG.md", "config.example.yaml"} <= names
    assert {name.split("/")[0] for name in names} & {"tests", "bench", "docs", "deploy", "lab"} == set()


@pytest.mark.parametrize("asked", [False, True])
def test_a_build_compiles_only_where_it_is_asked_to(asked: bool) -> None:
    """An installation from source takes seconds, and needs neither mypy nor a C compiler."""
    code = "from hatchling.build import get_requires_for_build_wheel as needs; print(*needs())"
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=environment(**COMPILE if asked else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("hatch-mypyc" in said.stdout) == asked
    assert ("msgspec" in said.stdout) == asked
