"""The count of code that `python -m tests.tidy.weight` prints."""

from __future__ import annotations

from tests.tidy.weight import code_lines, script_lines


def test_docstrings_comments_and_blank_lines_weigh_nothing() -> None:
    source = '"""What?"""\n\n# why\n\ndef answer() -> str:\n    """Says it."""\n    return """4\n2"""  # both lines\n'
    assert code_lines(source) == 3


def test_comments_of_scripts_weigh_nothing() -> None:
    assert script_lines("-- why\nreturn 1\n\n", ".lua") == 1
    assert script_lines("// why\n/* and\n   how */\nlet a = 1;\n", ".js") == 1
