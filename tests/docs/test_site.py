"""The site builds without a warning, works without a network, and its pictures are drawn from the code as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import pictures
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", folder / "doctrees", ROOT / "docs", folder],
        capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_nothing_of_the_site_comes_from_elsewhere(site: Path) -> None:
    """No script, font, style or picture of another machine. Links that a reader follows may go there."""
    loads = re.compile(
        r"<(?:script|img|source|iframe)[^>]*\ssrc(?:set)?=\"(?:https?:)?//[^\"]*|url\([\"']?(?:https?:)?//[^)]*"
    )
    sheets = re.compile(r"<link[^>]*rel=\"(?:stylesheet|preload|preconnect)\"[^>]*href=\"(?:https?:)?//[^\"]*|@import")
    found = [
        f"{page.relative_to(site)}: {hit[0][:120]}"
        for page in [*site.rglob("*.html"), *site.rglob("*.css")]
        for pattern in (loads, sheets)
        for hit in pattern.finditer(page.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_picture_is_there(site: Path) -> None:
    """Those of Markdown, and those of HTML in it, which no builder looks at."""
    shows = re.compile(r"<(?:img|source)\b[^>]*?\s(?:src|srcset)=\"([^\":?#]+)\"")
    shown = [(page, target) for page in site.rglob("*.html") for target in shows.findall(page.read_text("utf-8"))]
    assert any(target.endswith("page-dark.png") for _, target in shown)
    assert [
        f"{page.relative_to(site)}: {target}" for page, target in shown if not (page.parent / target).exists()
    ] == []


def test_every_page_can_be_reached(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 40
    assert [page for page in pages if page != "index.html" and f'href="{page}"' not in text] == []


def test_the_links_of_pages_outside_the_site_lead_somewhere() -> None:
    for name in ("README.md", "ARCHITECTURE.md", "bench/README.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not re.match(r"https?:", target):
                assert (page.parent / target).exists(), f"{name}: {target}"


def test_the_drawings_of_policies_are_what_the_code_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FIGURES", tmp_path)
    pictures.draw()
    drawn = {one.name: one.read_text() for one in tmp_path.iterdir()}
    assert len(drawn) == 8
    for name, text in drawn.items():
        assert text == (ROOT / "docs/figures" / name).read_text(), "run: python -m docs.generate.pictures"
