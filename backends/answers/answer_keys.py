"""How does an answer begin, and what does it ask of tools? By that the next request of its talk is known.

Looked for in the bytes, beside everything else: neither a whole answer nor an event is read for it.
"""

from __future__ import annotations

import re
from typing import Final

KEY_BYTES_MAX: Final = 1024
"""Of the text of an answer, as much is kept."""
IDS_MAX: Final = 64
"""Calls of tools whose ids are kept."""
_TEXT: Final = re.compile(rb'"(?:content|text|delta)"\s{0,4}:\s{0,4}"([^"\\]*+(?:\\.[^"\\]*+)*+)', re.DOTALL)
_ARGUMENTS: Final = re.compile(rb'"(?:arguments|partial_json)"\s{0,4}:\s{0,4}"([^"\\]*+(?:\\.[^"\\]*+)*+)', re.DOTALL)
_CALL_ID: Final = re.compile(rb'"call_id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')
_ID: Final = re.compile(rb'"id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')


class AnswerKeys:
    """What is kept of one answer.

    Attributes:
        text: how it begins, as it stands in a string of JSON.
        arguments: how the arguments of its calls begin, one after another; JSON, as it stands in a string of JSON.
        tool_ids: names of its calls of tools, by which their results come back.
    """

    __slots__ = ("arguments", "text", "tool_ids")

    def __init__(self) -> None:
        self.text = b""
        self.arguments = b""
        self.tool_ids: dict[bytes, None] = {}

    def add(self, text: bytes) -> None:
        """This comes next in its text."""
        if len(self.text) < KEY_BYTES_MAX:
            self.text += text

    def add_texts(self, json: bytes) -> None:
        """So do the texts in this JSON."""
        for found in _TEXT.finditer(json):
            if len(self.text) >= KEY_BYTES_MAX:
                return
            self.text += found[1][:KEY_BYTES_MAX]

    def add_calls(self, json: bytes, at: int = 0) -> None:
        """It asks for the calls of tools in this JSON."""
        if len(self.arguments) < KEY_BYTES_MAX:
            self.arguments += b"".join(_ARGUMENTS.findall(json, at))[:KEY_BYTES_MAX]
        if len(self.tool_ids) < IDS_MAX:
            for found in (_CALL_ID.findall(json, at) or _ID.findall(json, at))[:IDS_MAX]:
                self.tool_ids[found] = None
