"""Every example of README and docs is run, word for word; what cannot be run here says why, and is counted."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from gateway.config.load import ConfigError, load_config
from tests.docs.examples import PAGES, ROOT, Page, as_json, blocks

ALL = [block for page in PAGES for block in blocks(page)]
RUN = [
    page
    for page in PAGES
    if any(one.language in ("sh", "console", "python") and not one.why_not for one in blocks(page))
]
NOT_RUN_MAX = 40
LANGUAGES = {"", "text", "sh", "console", "python", "yaml", "json", "toctree", "nginx", "mermaid", "promql"}


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a run: what one has installed is there for the others."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "clones"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path, clones: Path) -> None:
    it = Page(page, tmp_path, clones)
    try:
        assert it.run() == []
    finally:
        it.stop()


def test_what_is_not_run_says_why_and_is_little() -> None:
    skipped = [one for one in ALL if one.mark and one.mark.startswith("not run")]
    assert [f"{one.page}:{one.line}" for one in skipped if len(one.why_not) < 10] == []
    assert len(skipped) <= NOT_RUN_MAX, Counter(one.page for one in skipped)


def test_every_block_is_of_a_language_that_is_known_here() -> None:
    assert {f"{one.page}:{one.line} {one.language}" for one in ALL if one.language not in LANGUAGES} == set()


def test_every_configuration_that_is_shown_is_one(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = []
    for one in ALL:
        if one.language == "yaml" and not one.why_not:
            for name in re.findall(r"\$\{(\w+)\}", one.text):
                monkeypatch.setenv(name, "127.0.0.1:9")
            for text in _alternatives(one.text):
                for known, ours in files.items():
                    text = text.replace(known, ours)
                file = tmp_path / "config.yaml"
                file.write_text(_whole(text))
                try:
                    load_config(file)
                except ConfigError as error:
                    faults.append(f"{one.page}:{one.line}: {error}")
    assert faults == []


def _alternatives(text: str) -> list[str]:
    """A block that shows one field several times shows so many ways to write it."""
    fields = re.findall(r"^(\w+):", text, re.MULTILINE)
    if len(fields) == len(set(fields)):
        return [text]
    return [part for part in re.split(r"^(?=\w+:)", text, flags=re.MULTILINE) if part.strip(" \n#or") and ":" in part]


LEAST = {
    "pools": "[{name: main, models: [llama-3.1-8b], backends: [{url: 'http://gpu:8000'}]}]",
    "tenants": "[{name: alice}]",
}
"""What a configuration needs besides, if it is not shown."""


def _whole(shown: str) -> str:
    return shown + "".join(f"{name}: {text}\n" for name, text in LEAST.items() if f"\n{name}:" not in f"\n{shown}")


def test_every_json_that_is_shown_is_json() -> None:
    for one in ALL:
        if one.language == "json" and not one.why_not:
            as_json(one.text)
