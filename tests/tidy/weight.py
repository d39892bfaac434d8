"""How many lines of code has each room of the four packages, without docstrings, comments and blank lines?

Lua and JavaScript count as Python does.

python -m tests.tidy.weight
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

PACKAGES = ("policies", "backends", "gateway", "simulation")
ROOT = Path(__file__).parents[2]
COMMENTS = {".lua": r"^\s*--[^\n]*", ".js": r"^\s*//[^\n]*|/\*.*?\*/"}
IS_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines with a token of code; a string that stands alone is a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IS_NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def script_lines(source: str, suffix: str) -> int:
    """Return the lines of a Lua or JavaScript file that are neither blank nor comments."""
    without = re.sub(COMMENTS[suffix], "", source, flags=re.MULTILINE | re.DOTALL)
    return sum(bool(line.strip()) for line in without.splitlines())


def rooms() -> Counter[str]:
    """Return the lines of code by folder."""
    weights: Counter[str] = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.*"):
            if path.suffix == ".py" or path.suffix in COMMENTS:
                source = path.read_text(encoding="utf-8")
                lines = code_lines(source) if path.suffix == ".py" else script_lines(source, path.suffix)
                weights[path.parent.relative_to(ROOT).as_posix()] += lines
    return weights


def main() -> None:
    weights = rooms()
    for room in sorted(weights):
        print(f"{weights[room]:7,} {room}")
    for package in PACKAGES:
        print(f"{sum(n for room, n in weights.items() if room.split('/')[0] == package):7,} all of {package}")
    print(f"{weights.total():7,} all")


if __name__ == "__main__":
    main()
