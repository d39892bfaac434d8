"""The correlation keys by which the interaction of a conversation, or of an answer, is recognised.

An answer gives out text and the ids of its tool calls. The next request brings the ids back, whatever has become of the
history, or it has the text as a turn, perhaps amid other text. Example: an answer ends with the call `call_7f`, and the
next request holds a result with `"tool_call_id":"call_7f"`, so both are of one interaction.

Only the last turns and the first two are read, and only the beginning of each, so a long conversation takes no longer
than a short one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_hexdigest

from gateway.request.fields import Turn, TurnKeys, decode_name

IDS_MAX: Final = 64
"""Most ids of tool calls that are read in one request or answer."""
FIRST_TURNS: Final = 2
LAST_TURNS: Final = 48
"""Turns read at the end of a conversation: more than at its beginning, because each result of parallel tool calls is a
turn."""
READ_TURNS: Final = 5
"""Last turns that are read for lines, beside the model's last turn."""
TEXT_BYTES_MAX: Final = 1 << 13
"""Bytes read of one turn."""
TEXTS_MAX: Final = 4
"""Text blocks read of one turn."""
LINES_MAX: Final = 16
"""Most lines looked up for one request."""
LINE_MIN: Final = 32
"""Shortest line that is a key. Shorter ones, such as the mark around a block of code, are too common."""
LINE_MAX: Final = 200
"""Characters of a line that count."""

_BACKSLASH: Final = ord("\\")
_TEXT_OF_BLOCK: Final = re.compile(rb'"text"\s{0,4}:\s{0,4}"')
_UNITS: Final = re.compile(rb'[^"\\]*+(?:(?:\\u[0-9a-fA-F]{4}|\\[^u])[^"\\]*+)*+')
_STRING: Final = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)')
_RESULT_OF: Final = re.compile(rb'"tool_use_id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')
_ID_IN_TEXT: Final = re.compile(rb"(?:'id': '|\\\"id\\\": ?\\\")([A-Za-z0-9_.:-]{4,256})")


def build_turn_keys(first: Sequence[Turn], last: Sequence[Turn]) -> TurnKeys:
    """Return the keys of a conversation with these first and last turns, which may overlap."""
    begin = end = len(last)  # bounds of the model's last turn, which may have several items
    while end and not is_models(last[end - 1]):
        end -= 1
    begin = end
    while begin and is_models(last[begin - 1]):
        begin -= 1
    since = last[end:]
    tool_ids = _brought_back(since)
    if tool_ids or not since or since[-1].role != "user":
        return TurnKeys(tool_ids)
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
    """Return whether the model wrote this turn."""
    role = turn.role
    return role == "assistant" or (role is None and not (turn.type or "").endswith("_output"))


def name_of(text: str) -> bytes:
    """Return a short name of a turn's text."""
    return xxh3_64_digest(text.encode("utf-8", "surrogatepass"))


def named(*parts: bytes | memoryview) -> str:
    """Return a short name of these parts, by XXH3, at a tenth of sha256's cost. The parts are JSON or printable, so
    none holds a NUL."""
    return xxh3_64_hexdigest(b"\0".join(parts))


def hashed(*parts: bytes) -> str:
    """Return a short name that hides its parts, which may be a client's ids."""
    return sha256(b"\0".join(parts)).hexdigest()[:16]


def turn_of(before: bytes, text: str) -> bytes:
    """Return a key of the answer `text` to the turn named `before`: the name and the answer's first line. Return b""
    without either."""
    begin = text.lstrip()
    if not before or not begin:
        return b""
    row = begin[:LINE_MAX].replace("\r", "\n").partition("\n")[0]
    return before + row.rstrip().encode("utf-8", "surrogatepass")


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are long enough to be keys."""
    lines: list[str] = []
    for row in text.replace("\r", "\n").split("\n"):
        if len(row) >= LINE_MIN:
            line = row.strip()
            if len(line) >= LINE_MIN:
                lines.append(line[:LINE_MAX])
                if len(lines) == LINES_MAX:
                    break
    return lines


def find_lines(json: str) -> list[str]:
    """Return the lines of this JSON's strings that are long enough to be keys."""
    return [line for found in _STRING.findall(json) for line in lines_of(decoded(found.encode(), 0))]


def text_of(content: bytes) -> str:
    """Return the beginning of a turn's text. `content` is a JSON string, or a list of blocks."""
    if content[:1] == b'"':
        if len(content) <= TEXT_BYTES_MAX:
            try:
                return decode_name(content)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # truncated
        return decoded(content, 1)
    if content[:1] != b"[":
        return ""
    begins = [found.end() for found in _TEXT_OF_BLOCK.finditer(content, 0, TEXT_BYTES_MAX)]
    return "\n".join([decoded(content, begin) for begin in begins[:TEXTS_MAX]])


def json_text(text: bytes) -> str:
    """Return the text that a JSON string has between its quotes. `text` may be truncated."""
    if len(text) <= TEXT_BYTES_MAX:
        try:
            return decode_name(b'"%b"' % text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass  # truncated
    return decoded(text, 0)


def decoded(content: bytes, begin: int) -> str:
    """Return the text of the JSON string that begins here, up to its closing quote or the read limit."""
    try:
        return decode_name(b'"' + content[begin : _end_of_string(content, begin)] + b'"')
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # truncated within an escape or a letter
    found = _UNITS.match(content, begin, max(begin, TEXT_BYTES_MAX))
    assert found is not None
    try:
        return decode_name(b'"' + found[0] + b'"')
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:  # truncated within a letter
        return decode_name(b'"' + found[0].decode("utf-8", "ignore").encode() + b'"')
    except msgspec.DecodeError:
        return ""


def _end_of_string(content: bytes, begin: int) -> int:
    """Return the position of the closing quote, or of the read limit. Behind an odd number of backslashes a quote is
    text."""
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
    """Return the ids of the tool calls whose results are among these turns, the latest first."""
    ids: list[bytes] = []
    for turn in reversed(since):
        ids += [bytes(raw)[1:-1] for raw in (turn.tool_call_id, turn.call_id) if len(raw) > len('""')]
        content = bytes(turn.content) if turn.role == "user" else b""
        if content.startswith(b"["):
            ids += _RESULT_OF.findall(content, 0, TEXT_BYTES_MAX)[:IDS_MAX]
        if len(ids) >= IDS_MAX:
            break
    return ids[:IDS_MAX]
