"""Correlation keys of an answer: its beginning and its tool calls, by which the conversation's next request is known.

The keys are found in the bytes by patterns; neither an answer nor an event is parsed for them.
"""

from __future__ import annotations

import re
from typing import Final

KEY_BYTES_MAX: Final = 1024
"""Bytes of an answer's text that are kept."""
IDS_MAX: Final = 64
"""Tool call ids that are kept."""
_TEXT: Final = re.compile(rb'"(?:content|text|delta)"\s{0,4}:\s{0,4}"([^"\\]*+(?:\\.[^"\\]*+)*+)', re.DOTALL)
_ARGUMENTS: Final = re.compile(rb'"(?:arguments|partial_json)"\s{0,4}:\s{0,4}"([^"\\]*+(?:\\.[^"\\]*+)*+)', re.DOTALL)
_CALL_ID: Final = re.compile(rb'"call_id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')
_ID: Final = re.compile(rb'"id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')


class AnswerKeys:
    """The correlation keys of one answer.

    Attributes:
        text: the beginning of its text, escaped as in JSON.
        arguments: the beginning of its tool calls' arguments, concatenated, escaped as in JSON.
        tool_ids: ids of its tool calls, by which their results come back.
    """

    __slots__ = ("arguments", "text", "tool_ids")

    def __init__(self) -> None:
        self.text = b""
        self.arguments = b""
        self.tool_ids: dict[bytes, None] = {}

    def add_texts(self, json: bytes) -> None:
        """Append the texts in this JSON until the key has `KEY_BYTES_MAX` bytes."""
        for found in _TEXT.finditer(json):
            if len(self.text) >= KEY_BYTES_MAX:
                return
            self.text += found[1][:KEY_BYTES_MAX]

    def add_calls(self, json: bytes, at: int = 0) -> None:
        """Keep ids and arguments of the tool calls in this JSON."""
        if len(self.arguments) < KEY_BYTES_MAX:
            self.arguments += b"".join(_ARGUMENTS.findall(json, at))[:KEY_BYTES_MAX]
        if len(self.tool_ids) < IDS_MAX:
            for found in (_CALL_ID.findall(json, at) or _ID.findall(json, at))[:IDS_MAX]:
                self.tool_ids[found] = None
