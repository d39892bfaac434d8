"""Writes into the pages what the replays that they show print now: `python -m docs.generate.replayed`.

A page that shows one line of it keeps showing one line. Whatever changes a decision changes these numbers.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
SHOWN = re.compile(
    r"^```sh\n(fairgate replay docs/examples/[^\n]*)\n```\n((?:(?!```)[^\n]*\n)*?)```(text)?\n(.*?)```$", re.M | re.S
)


def rewritten(text: str) -> str:
    """The page with what its commands print now."""

    def now(found: re.Match[str]) -> str:
        command, between, kind, before = found.groups()
        said = printed(command)
        if before.count("\n") == 1:
            said = said.split("\n")[0] + "\n"
        return f"```sh\n{command}\n```\n{between}```{kind or ''}\n{said}```"

    return SHOWN.sub(now, text)


def printed(command: str) -> str:
    arguments = [sys.executable, "-m", "gateway.commands.main", *shlex.split(command)[1:]]
    return subprocess.run(arguments, cwd=DOCS.parent, capture_output=True, text=True, check=True).stdout


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"written: {page.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
