"""The four packages become no heavier: what is added is paid for by what goes."""

from __future__ import annotations

from tests.tidy.weight import code_lines, rooms

CODE_LINES_MAX = 29_300
"""Lower it to what `python -m tests.tidy.weight` says when code has gone. It rises only with a reason in CHANGELOG."""


def test_the_code_is_no_heavier_than_it_was() -> None:
    assert rooms().total() <= CODE_LINES_MAX, "python -m tests.tidy.weight shows which room grew"


def test_docstrings_comments_and_blank_lines_weigh_nothing() -> None:
    source = '"""What?"""\n\n# why\n\ndef answer() -> str:\n    """Says it."""\n    return """4\n2"""  # both lines\n'
    assert code_lines(source) == 3
