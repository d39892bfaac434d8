"""The README is short, and plain: its length, its sentences, its words."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES_MAX, WORDS_MEAN_MAX, WORDS_MAX = 110, 18, 30
PLAIN = {"order", "weight", "tenant", "refuse", "policy", "app", "stage", "window"}
"""Words of the glossary that mean in the README what they mean anywhere."""


def prose() -> str:
    """Without code, tables, pictures and the addresses of links."""
    text = re.sub(r"^```.*?^```|^\|.*?$|^!\[.*?\)$|<[^>]+>", "", README, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences() -> list[str]:
    parts = re.split(r"\n\s*\n|^#+.*$|^\s*(?:[-*]|\d+\.)\s", prose(), flags=re.MULTILINE)
    found = [one.strip() for part in parts for one in re.split(r"(?<=[.!?:])\s+", " ".join(part.split()))]
    return [one for one in found if len(one.split()) > 2]


def test_the_readme_is_at_most_two_screens() -> None:
    assert len(README.splitlines()) <= LINES_MAX


def test_its_sentences_are_short() -> None:
    lengths = [len(one.split()) for one in sentences()]
    assert len(lengths) > 25
    assert sum(lengths) / len(lengths) < WORDS_MEAN_MAX
    assert [one for one in sentences() if len(one.split()) > WORDS_MAX] == []


def test_no_sentence_needs_the_glossary() -> None:
    glossary = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## Glossary")[1]
    words = {word.strip() for row in re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE) for word in row.split(",")}
    special = words - PLAIN - {"word", "---"}
    assert len(special) > 20
    text = re.sub(r"`[^`]*`", "", prose()).lower()
    assert {word for word in special if re.search(rf"\b{re.escape(word)}s?\b", text)} == set()


def test_it_says_what_it_does_in_six_sentences_and_what_it_costs_in_five_rows() -> None:
    does = README.split("## What it does")[1].split("##")[0]
    costs = README.split("## What it costs")[1].split("##")[0]
    assert len(re.findall(r"^\d\. ", does, re.MULTILINE)) == 6
    assert len(re.findall(r"^\| (?!---|\|)", costs, re.MULTILINE)) == 5
