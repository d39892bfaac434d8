"""How is a large JSON body read while others wait? In slices, and without a copy of what is long in it.

The generators here yield whenever they have read some more; their caller decides when they go on. What comes out is a
`Payload` like that of a small body, whose answers to the questions that would need the whole text are ready-made.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator
from io import BytesIO
from typing import Final

import msgspec
from msgspec import Raw
from xxhash import xxh3_64

from gateway.http.errors import ApiError, Reason
from gateway.request.apis import COMPLETIONS, NAMES, Api
from gateway.request.body.asked import Asked
from gateway.request.body.json_ranges import ITEM_COST, ObjectMember, broken, items, members, past_space
from gateway.request.body.payload import SEQUENCES_MAX, STEERING, JsonPayload, fields_of, user_of, with_usage
from gateway.request.body.slices import WINDOW_BYTES, Slices, find
from gateway.request.conversation.turn_keys import (
    FIRST_TURNS,
    LAST_TURNS,
    NO_TURN_KEYS,
    TEXT_BYTES_MAX,
    TurnKeys,
    keys_of_turns,
)
from gateway.request.conversation.turns import (
    NO_TURNS,
    QUOTE,
    TOOL_RESULT,
    Shape,
    TurnKind,
    Turns,
    and_rest,
    holds_result,
    is_of_result,
    same_text,
)
from gateway.request.fields import Fields, Turn, decode_turn, encode
from gateway.request.prompt import ATTACHMENT, HEAD_BYTES_MAX, Prompt

FIELD_BYTES_MAX: Final = 1 << 16
"""Of a field that is no prompt: models, users, metadata and the like."""
TURNS_MAX: Final = 1 << 16
RAW_PROMPT_BYTES_MAX: Final = 4 << 20
"""A raw prompt up to this length may go on with an earlier one."""
COPIED_BYTES: Final = 1 << 20
ATTACHMENTS_MAX: Final = 4096
"""What is attached beyond counts as text."""

_PROMPT_AT: Final = NAMES.index("tools")
_BASE64: Final = re.compile(rb"[A-Za-z0-9+/=\\]*+")
_OPEN_LIST, _OPEN_OBJECT = 0x5B, 0x7B


class HashedTurns(Turns):
    """The turns of a large body: only a hash of each question is kept, not its text."""

    __slots__ = ("_all", "_all_before", "_asks", "_last")

    def __init__(self, shape: Shape, asked: Asked, last_asked: xxh3_64, keys: TurnKeys) -> None:
        super().__init__([], asked.answered, shape, keys)
        self._asks = asked.count > 0
        self._all = asked.all
        self._all_before = asked.all_answered
        self._last = last_asked

    @property
    def asks(self) -> bool:
        return self._asks

    def named(self, *rest: bytes, last_only: bool = False) -> str:
        return and_rest((self._last if last_only else self._all).copy(), rest)

    def named_before(self, *rest: bytes) -> str:
        return and_rest(self._all_before.copy(), rest)


class LargePayload(JsonPayload):
    """A large body. Its edits are made when it is sealed, by one copy, and only if something in it changes."""

    __slots__ = ("_instruction_bytes", "_members", "_prompt_param", "_raw_prompt", "_rewritten", "_turns")

    def __init__(
        self,
        body: bytes,
        fields: Fields,
        api: Api,
        prompt: Prompt,
        prompts: int,
        places: dict[str, ObjectMember],
        found: list[ObjectMember],
        turns: Turns,
    ) -> None:
        super().__init__(body, fields, api, prompt, prompts, fields.model or "", bool(fields.stream), user_of(fields))
        self._turns = turns
        self._members = found
        self._rewritten: dict[str, bytes] = {}
        """Members that are written anew, by name."""
        self._prompt_param = next((name for name in reversed(api.prompt) if name in places), None)
        beside = [places[name] for name in ("system", "instructions") if name in places]
        self._instruction_bytes = sum([each.end - each.value for each in beside])
        is_compared = api is COMPLETIONS and prompt.size <= RAW_PROMPT_BYTES_MAX
        self._raw_prompt = Raw(prompt.head) if is_compared else Raw()

    @property
    def prompt_param(self) -> str | None:
        return self._prompt_param

    @property
    def raw_prompt(self) -> Raw:
        return self._raw_prompt

    @property
    def instruction_bytes(self) -> int:
        return self._instruction_bytes

    def turns(self) -> Turns:
        return self._turns

    def ask_usage(self) -> None:
        options = b"null"
        for each in self._members:
            if each.name == "stream_options":
                options = self.body[each.value : each.end]
        self._rewritten["stream_options"] = b'"stream_options":' + with_usage(options)

    def rename(self, model: str) -> None:
        if not self._members:  # it is sealed
            super().rename(model)
            return
        self.model = model
        self._rewritten["model"] = b'"model":' + encode(model)

    def _pieces(self) -> list[bytes | memoryview]:
        """Of what it will be made."""
        found = self._members
        rewritten = self._rewritten
        kept = [each for each in found if each.name not in STEERING and each.name not in rewritten]
        if len(kept) == len(found) and not rewritten:
            return [self.body]
        view = memoryview(self.body)
        pieces: list[bytes | memoryview] = [b"{"]
        for each in kept:
            pieces += (view[each.at : each.end], b",")
        for member in rewritten.values():
            pieces += (member, b",")
        if kept or rewritten:
            pieces.pop()  # the last comma
        pieces.append(b"}")
        return pieces

    def seal(self) -> Slices:
        """Make the body as it goes to the engine, while others wait: many megabytes may be copied here."""
        pieces = self._pieces()
        self._forget()
        if len(pieces) > 1:
            whole = BytesIO()  # hands out what was written without a copy of its own
            for piece in pieces:
                for at in range(0, len(piece), COPIED_BYTES):
                    whole.write(piece[at : at + COPIED_BYTES])
                    yield
            self.body = whole.getvalue()

    def _forget(self) -> None:
        """Keep no more of it than the engine gets."""
        self._members = []
        self._rewritten = {}
        self.prompt.head = b""
        self._raw_prompt = Raw()
        self._turns = NO_TURNS


def read_large_json(body: bytes, api: Api) -> Generator[None, None, LargePayload]:
    """Read a large JSON body, or raise `ApiError` 400 that says which field is wrong."""
    at = yield from past_space(body, 0)
    if at == len(body) or body[at] != _OPEN_OBJECT:
        raise ApiError(Reason.INVALID_JSON, "the body must be a JSON object")
    found: list[ObjectMember] = []
    end = yield from members(body, at, found)
    end = yield from past_space(body, end)
    if end != len(body):
        raise broken(f"something follows the object at byte {end}")
    places = {member.name: member for member in found if member.name}
    fields = _short_fields(body, places)
    prompt = yield from _prompt(body, [places[name] for name in api.prompt if name in places])
    prompts = yield from _prompts(body, places.get("prompt"))
    turns = yield from _turns(body, places.get(api.conversation), api.conversation)
    return LargePayload(body, fields, api, prompt, prompts, places, found, turns)


def _short_fields(body: bytes, places: dict[str, ObjectMember]) -> Fields:
    parts: list[bytes] = []
    for name in NAMES[:_PROMPT_AT]:
        place = places.get(name)
        if place is None:
            continue
        size = place.end - place.value
        if size > FIELD_BYTES_MAX:
            message = f"'{name}' has {size} bytes; at most {FIELD_BYTES_MAX} are read"
            raise ApiError(Reason.INVALID_REQUEST, message, param=name)
        parts.append(b'"%b":%b' % (name.encode(), body[place.value : place.end]))
    return fields_of(b"{" + b",".join(parts) + b"}")


# --- the prompt ---


def _prompt(body: bytes, parts: list[ObjectMember]) -> Generator[None, None, Prompt]:
    size = attachments = attached_bytes = looked = 0
    head: list[bytes] = []
    for part in parts:
        head.append(body[part.value : min(part.end, part.value + max(0, HEAD_BYTES_MAX - size))])
        size += part.end - part.value
        at = yield from find(body, ATTACHMENT, part.value, part.end)
        while at >= 0 and attachments < ATTACHMENTS_MAX:
            end = yield from _end_of_base64(body, at + len(ATTACHMENT), part.end)
            if end > at + len(ATTACHMENT):
                attachments += 1
                attached_bytes += end - at
            looked += ITEM_COST
            if looked >= WINDOW_BYTES:
                looked = 0
                yield
            at = yield from find(body, ATTACHMENT, end, part.end)
    return Prompt(b"".join(head), size, attachments, attached_bytes)


def _end_of_base64(body: bytes, at: int, end: int) -> Generator[None, None, int]:
    while True:
        stop = min(at + WINDOW_BYTES, end)
        match = _BASE64.match(body, at, stop)
        assert match is not None
        at = match.end()
        if at < stop or at == end:
            return at
        yield


def _prompts(body: bytes, place: ObjectMember | None) -> Generator[None, None, int]:
    if place is None or body[place.value] != _OPEN_LIST:
        return 1
    found = array("q")
    first = yield from past_space(body, place.value + 1)
    if body[first] != QUOTE and body[first] != _OPEN_LIST:
        return 1  # tokens
    yield from items(body, place.value, found, SEQUENCES_MAX)
    return len(found) // 2


# --- the conversation ---


def _turns(body: bytes, place: ObjectMember | None, param: str) -> Generator[None, None, Turns]:
    if place is None:
        return NO_TURNS
    shape, asked = Shape(), Asked(body)
    keys = NO_TURN_KEYS
    if body[place.value] == QUOTE:
        yield from asked.add_range(place.value, place.end)
        shape.of_user(is_question=True)
    elif body[place.value] == _OPEN_LIST:
        found = array("q")
        yield from items(body, place.value, found, TURNS_MAX)
        if len(found) > 2 * TURNS_MAX:
            message = f"'{param}' has more than {TURNS_MAX} turns; no model's context has room for so many"
            raise ApiError(Reason.INVALID_REQUEST, message, param=param)
        try:
            yield from _read_turns(body, found, shape, asked)
            first = yield from _some_turns(body, found[: 2 * FIRST_TURNS])
            last = yield from _some_turns(body, found[-2 * LAST_TURNS :])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return NO_TURNS
        keys = keys_of_turns(first, last)
    else:
        return NO_TURNS
    last_asked = yield from asked.last()
    return HashedTurns(shape, asked, last_asked, keys)


def _read_turns(body: bytes, found: array[int], shape: Shape, asked: Asked) -> Slices:
    read = 0
    for number in range(0, len(found), 2):
        at, end = found[number], found[number + 1]
        read += end - at + ITEM_COST
        if read >= WINDOW_BYTES:
            read = 0
            yield
        if end - at > WINDOW_BYTES:
            yield from _read_long_turn(body, at, shape, asked)
            continue
        turn = decode_turn(body[at:end])
        content = bytes(turn.content)
        if turn.role != "user":
            asked.note(shape.of_other(turn, len(content)))
            continue
        kind = shape.of_user(is_question=not (content.startswith(b"[") and holds_result(content)))
        if kind is TurnKind.ASKS:
            asked.add(same_text(content))
        else:
            asked.note(kind)


def _read_long_turn(body: bytes, at: int, shape: Shape, asked: Asked) -> Slices:
    turn, place = yield from _long_turn(body, at)
    if turn.role != "user":
        asked.note(shape.of_other(turn, 0 if place is None else place.end - place.value))
        return
    is_question = True
    looked = 0
    if place is not None and body[place.value] == _OPEN_LIST:
        result = yield from find(body, TOOL_RESULT, place.value, place.end)
        while result >= 0 and not is_of_result(body, result):
            looked += ITEM_COST
            if looked >= WINDOW_BYTES:
                looked = 0
                yield
            result = yield from find(body, TOOL_RESULT, result + 1, place.end)
        is_question = result < 0
    kind = shape.of_user(is_question=is_question)
    if kind is not TurnKind.ASKS:
        asked.note(kind)
    elif place is None:
        asked.add(b"")
    else:
        yield from asked.add_range(place.value, place.end)


def _some_turns(body: bytes, found: array[int]) -> Generator[None, None, list[Turn]]:
    """These turns, with the beginnings of their contents."""
    turns: list[Turn] = []
    for number in range(0, len(found), 2):
        at, end = found[number], found[number + 1]
        if end - at > WINDOW_BYTES:
            turn, place = yield from _long_turn(body, at)
            if place is not None:
                turn.content = Raw(body[place.value : min(place.end, place.value + TEXT_BYTES_MAX)])
        else:
            yield
            turn = decode_turn(body[at:end])
            turn.content = Raw(bytes(turn.content)[:TEXT_BYTES_MAX])
        turns.append(turn)
    return turns


def _long_turn(body: bytes, at: int) -> Generator[None, None, tuple[Turn, ObjectMember | None]]:
    """A turn without its content, and where that is."""
    if body[at] != _OPEN_OBJECT:
        raise msgspec.ValidationError("a turn is no object")
    found: list[ObjectMember] = []
    yield from members(body, at, found)
    places = {member.name: member for member in found}
    parts: list[bytes] = []
    for name in ("role", "type", "tool_call_id", "call_id"):
        place = places.get(name)
        if place is not None:
            parts.append(
                b'"%b":%b' % (name.encode(), body[place.value : min(place.end, place.value + FIELD_BYTES_MAX)])
            )
    return decode_turn(b"{" + b",".join(parts) + b"}"), places.get("content")
