"""By which correlation keys is the interaction of a conversation recognised, and that of an answer?

An answer gives out the ids of its calls of tools, and text. The next request brings the ids back, whatever has become
of the history, or it has the text as a turn, perhaps amid other text. Only the last turns and the first two are looked
at, and of each only its beginning, so that this takes as long for a long conversation as for a short one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_digest

from gateway.request.fields import Turn, decode_name

IDS_MAX: Final = 64
"""Ids of calls of tools that are looked at in one request or answer."""
FIRST_TURNS: Final = 2
LAST_TURNS: Final = 48
"""Turns at the end of a conversation that are read: more than at its beginning, because each result of a tool called in
parallel is a turn."""
READ_TURNS: Final = 5
"""Of these, as many are read for lines of earlier answers."""
TEXT_BYTES_MAX: Final = 1 << 13
"""Of one turn."""
TEXTS_MAX: Final = 4
"""Blocks of text of one turn."""
LINES_MAX: Final = 16
"""Lines that are looked up for one request."""
LINE_MIN: Final = 32
"""A shorter line says too little of whose it is: the mark around a block of code, say."""
LINE_MAX: Final = 200
"""So much of a longer one counts."""

_BACKSLASH: Final = ord("\\")
_TEXT_OF_BLOCK: Final = re.compile(rb'"text"\s{0,4}:\s{0,4}"')
_UNITS: Final = re.compile(rb'[^"\\]*+(?:(?:\\u[0-9a-fA-F]{4}|\\[^u])[^"\\]*+)*+')
_STRING: Final = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)')
_RESULT_OF: Final = re.compile(rb'"tool_use_id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')
_ID_IN_TEXT: Final = re.compile(rb"(?:'id': '|\\\"id\\\": ?\\\")([A-Za-z0-9_.:-]{4,256})")


class TurnKeys:
    """The correlation keys of a conversation, read from its last turns and its first.

    Attributes:
        tool_ids: of the calls whose results come last, or which the last turn of the model names in its text.
        last_turn: name of the user's last turn, if it comes after the model's; b"" if it does not.
        turn: the turn before the model's last one by name, and how that one begins; b"" if there is none.
        lines: of the turns at its end and at its beginning.
    """

    __slots__ = ("last_turn", "lines", "tool_ids", "turn")

    def __init__(self, tool_ids: list[bytes], last_turn: bytes, turn: bytes, lines: list[str]) -> None:
        self.tool_ids = tool_ids
        self.last_turn = last_turn
        self.turn = turn
        self.lines = lines


NO_TURN_KEYS: Final = TurnKeys([], b"", b"", [])


def keys_of_question(content: bytes, instructions: bytes) -> TurnKeys:
    """Return the keys that `keys_of_turns` finds for one text of the user, behind these instructions of the app."""
    asked = text_of(content)
    lines = _lines([asked, text_of(instructions)]) if instructions else lines_of(asked)
    return TurnKeys([], name_of(asked), b"", list(dict.fromkeys(lines)) if len(lines) > 1 else lines)


def keys_of_turns(first: Sequence[Turn], last: Sequence[Turn]) -> TurnKeys:
    """The keys of a conversation with these first and last turns; the same turns may be among both."""
    begin = end = len(last)  # of the model's last turn: all items in a row
    while end and not is_models(last[end - 1]):
        end -= 1
    begin = end
    while begin and is_models(last[begin - 1]):
        begin -= 1
    since = last[end:]
    tool_ids = _brought_back(since)
    if tool_ids or not since or since[-1].role != "user":
        return TurnKeys(tool_ids, b"", b"", [])
    made = [bytes(turn.content) for turn in last[begin:end]]
    for content in made:
        tool_ids += _ID_IN_TEXT.findall(content, 0, TEXT_BYTES_MAX)[:IDS_MAX]
    texts = [text_of(content) for content in made]
    asked = text_of(bytes(since[-1].content))
    before = last[begin - 1] if begin and last[begin - 1].role == "user" else None
    name = b"" if before is None else name_of(text_of(bytes(before.content)))
    turn = turn_of(name, next((text for text in texts if text), ""))
    read = {*range(begin, end), len(last) - 1}
    others = [last[at] for at in range(len(last) - 2, max(-1, len(last) - 1 - READ_TURNS), -1) if at not in read]
    others += [one for one in first if not any([one is other for other in last[-READ_TURNS:]])]
    texts += [asked, *[text_of(bytes(one.content)) for one in others]]
    return TurnKeys(tool_ids, name_of(asked), turn, _lines(texts))


def _lines(texts: list[str]) -> list[str]:
    found: list[str] = []
    for text in texts:
        for line in lines_of(text):
            if line not in found:
                found.append(line)
        if len(found) >= LINES_MAX:
            break
    return found[:LINES_MAX]


def is_models(turn: Turn) -> bool:
    """Did the model make it?"""
    role = turn.role
    return role == "assistant" or (role is None and not (turn.type or "").endswith("_output"))


def name_of(text: str) -> bytes:
    """A short name for what a turn says."""
    return xxh3_64_digest(text.encode("utf-8", "surrogatepass"))


def turn_of(before: bytes, text: str) -> bytes:
    """What sets an answer to the turn of this name apart: how it begins; b"" if it has no text, or that no name."""
    begin = text.lstrip()
    if not before or not begin:
        return b""
    row = begin[:LINE_MAX].replace("\r", "\n").partition("\n")[0]
    return before + row.rstrip().encode("utf-8", "surrogatepass")


def lines_of(text: str) -> list[str]:
    """The lines of a text that say something."""
    lines: list[str] = []
    for row in text.replace("\r", "\n").split("\n"):
        if len(row) >= LINE_MIN:
            line = row.strip()
            if len(line) >= LINE_MIN:
                lines.append(line[:LINE_MAX])
                if len(lines) == LINES_MAX:
                    break
    return lines


def lines_in(json: str) -> list[str]:
    """The same of the strings in this JSON."""
    return [line for found in _STRING.findall(json) for line in lines_of(decoded(found.encode(), 0))]


def text_of(content: bytes) -> str:
    """The beginning of the text of a turn: a string of JSON, or a list of blocks."""
    if content[:1] == b'"':
        if len(content) <= TEXT_BYTES_MAX:
            try:
                return decode_name(content)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # cut
        return decoded(content, 1)
    if content[:1] != b"[":
        return ""
    begins = [found.end() for found in _TEXT_OF_BLOCK.finditer(content, 0, TEXT_BYTES_MAX)]
    return "\n".join([decoded(content, begin) for begin in begins[:TEXTS_MAX]])


def json_text(text: bytes) -> str:
    """The text that stands so in a string of JSON, the quotes left out; it may be cut."""
    if len(text) <= TEXT_BYTES_MAX:
        try:
            return decode_name(b'"%b"' % text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass  # cut
    return decoded(text, 0)


def decoded(content: bytes, begin: int) -> str:
    """The text that begins here, up to its closing quote or the most that is read."""
    try:
        return decode_name(b'"' + content[begin : _end_of_string(content, begin)] + b'"')
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # cut amid an escape, or a letter
    found = _UNITS.match(content, begin, max(begin, TEXT_BYTES_MAX))
    assert found is not None
    try:
        return decode_name(b'"' + found[0] + b'"')
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:  # cut amid a letter
        return decode_name(b'"' + found[0].decode("utf-8", "ignore").encode() + b'"')
    except msgspec.DecodeError:
        return ""


def _end_of_string(content: bytes, begin: int) -> int:
    """Where its closing quote stands, or where reading ends. Behind an odd number of backslashes a quote is text."""
    limit = min(len(content), max(begin, TEXT_BYTES_MAX))
    at = content.find(b'"', begin, limit)
    while at >= 0:
        slashes = at
        while slashes > begin and content[slashes - 1] == _BACKSLASH:
            slashes -= 1
        if not (at - slashes) % 2:
            return at
        at = content.find(b'"', at + 1, limit)
    return limit


def _brought_back(since: Sequence[Turn]) -> list[bytes]:
    """Ids of the calls whose results are among these turns, the latest first."""
    ids: list[bytes] = []
    for turn in reversed(since):
        ids += [bytes(raw)[1:-1] for raw in (turn.tool_call_id, turn.call_id) if len(raw) > len('""')]
        content = bytes(turn.content) if turn.role == "user" else b""
        if content.startswith(b"["):
            ids += _RESULT_OF.findall(content, 0, TEXT_BYTES_MAX)[:IDS_MAX]
        if len(ids) >= IDS_MAX:
            break
    return ids[:IDS_MAX]
