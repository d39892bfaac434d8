"""Which interaction does a request belong to? Read from data that clients send anyway, so that no client must change.

The sources in their order: the client's own words (`x-fairgate-*` headers); the content (a tool's result continues an
answer, a user's turn begins an interaction); a raw prompt, if it extends an earlier one. An agent's session spans
several interactions, so a session header is a weak key, and a strong one only for a tool's result. All of it is a
claim: it groups calls within one flow, nothing more.

Ids leave this module hashed: they are short whatever the client wrote, and a log may hold them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Final
from zlib import crc32

from msgspec import Raw

from backends.answers.answer import AnswerKeys
from gateway.config.sections.apps import InteractionRules
from gateway.http.errors import ApiError, Reason
from gateway.request.body.payload import Payload
from gateway.request.conversation.turn_keys import (
    IDS_MAX,
    LINES_MAX,
    find_lines,
    hashed,
    json_text,
    lines_of,
    name_of,
    named,
    text_of,
    turn_of,
)
from gateway.request.conversation.turns import INSTRUCTS, QUOTE, Turns, name_of_questions, read_turns
from gateway.request.fields import Fields, Turn, decode_turns
from policies.request import NO_CLAIM, NO_KEYS, Claim, CorrelationKeys, Flow

ID_LENGTH_MAX: Final = 256
STAGE_MAX: Final = 100_000
LINES_GIVEN: Final = 3
"""Lines of an answer that become keys."""
LINES_OF_A_NEW_TALK: Final = 2
"""Lines of earlier answers by which a conversation without an answer joins their interaction. Several agents, each with
a conversation of its own, may work on one answer. A line of a tool call's arguments counts twice."""
_TASK: Final = 0x5A5A5A5A5A5A5A5
"""Marks lines of a tool call's arguments, which another agent may have as its task."""
PROMPTED_FLOWS_MAX: Final = 4096
LENGTHS_MAX: Final = 32
"""Lengths of earlier raw prompts that a new prompt of the flow is compared at."""

SESSION_HEADERS: Final = (
    b"x-parent-session-id", b"x-claude-code-session-id", b"x-opencode-session", b"x-session-affinity", b"session-id",
    b"session_id", b"conversation_id", b"x-session-id", b"x-litellm-session-id",
)  # fmt: skip
"""Session headers of OpenCode's sub-agents, Claude Code, OpenCode, Codex (now and formerly), vLLM's routers and
LiteLLM. The first one present counts."""
_ID, _STAGE, _END = b"x-fairgate-interaction", b"x-fairgate-stage", b"x-fairgate-end"
OF_INTEREST: Final = frozenset({_ID, _STAGE, _END, *SESSION_HEADERS})
_ID_IN_JSON: Final = re.compile(rb'"((?!id")[^"\\]{1,256})"\s{0,16}\}?\Z')
"""The last string of a JSON text, alone or at the end of an object, unless it is "id"."""
_SESSION_IN_METADATA: Final = re.compile(rb'"session_id"\s{0,4}:\s{0,4}"([^"\\]{1,256})"')
_OWN_CACHE_KEY: Final = re.compile(rb'"([^"\\]{0,64}[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}[^"\\]{0,64})"')
"""A cache key with a UUID, made for one conversation. Others are names of apps, common to all their users."""
NO_HEADERS: Final[Mapping[bytes, bytes]] = {}
_FLAGS: Final = {b"true": True, b"1": True, b"false": False, b"0": False}


class ClaimReader:
    """Derives from headers, metadata and prompt which interaction a request claims to belong to.

    Apps may have rules of their own. The lengths of raw prompts are remembered, since a later prompt may extend one.
    """

    def __init__(
        self, rules: InteractionRules, by_app: Mapping[str, InteractionRules], *, flows_max: int = PROMPTED_FLOWS_MAX
    ) -> None:
        """Create a reader. `flows_max`: most flows whose raw prompts' lengths are remembered."""
        self._rules = rules
        self._flows_max = flows_max
        self._by_app = by_app
        self._lengths: OrderedDict[Flow, list[int]] = OrderedDict()

    def read(
        self, headers: Mapping[bytes, bytes], payload: Payload, conversation: Raw, flow: Flow
    ) -> tuple[Claim, int]:
        """Return the claim of a request, and the bytes of its instructions, in turns or beside them. Raise `ApiError`
        400 if the client's own words about its interaction are invalid.

        `headers`: header fields by name. `conversation`: empty without one, as in a text to embed.
        """
        turns = decode_turns(conversation) if conversation else None
        instruction_bytes = len(payload.fields.system) + len(payload.fields.instructions)
        for turn in turns or ():
            if turn.role in INSTRUCTS:
                instruction_bytes += len(turn.content)
        rules = self._by_app.get(flow.app, self._rules)
        fields = NO_HEADERS if OF_INTEREST.isdisjoint(headers) else headers
        if rules.content and (turns is not None or bytes(conversation).startswith(b'"')):
            session = _session(fields, payload.fields) if rules.sessions else b""
            previous = payload.fields.previous_response_id or ""
            lone = claim_of_question(turns) if turns and not session and not previous else None
            claim = lone or claim_of_turns(read_turns(turns, conversation), session, previous.encode())
        elif rules.prefixes and payload.raw_prompt:
            claim = Claim(extends=self._prefixes(payload.raw_prompt, flow))
        else:
            claim = NO_CLAIM
        if rules.headers and fields:
            claim = _said(fields, claim)
        return claim, instruction_bytes

    def _prefixes(self, text: Raw, flow: Flow) -> tuple[int, ...]:
        """Return hashes of a raw prompt's beginnings, at the lengths of earlier prompts of its flow, and of all of it.

        Compared at just these lengths, prompts that share only a long template are not mistaken for one another.
        """
        view = memoryview(text)
        if view[0] != QUOTE:
            return ()  # several prompts at once, or tokens
        length = view.nbytes - 1  # the closing quote is not extended
        lengths = self._lengths.pop(flow, [])
        self._lengths[flow] = lengths
        if len(self._lengths) > self._flows_max:
            self._lengths.popitem(last=False)
        hashes = []
        crc = at = 0
        for end in (*sorted([known for known in lengths if known < length]), length):
            crc, at = crc32(view[at:end], crc), end
            hashes.append(end << 32 | crc)
        if length in lengths:
            lengths.remove(length)
        lengths.append(length)
        if len(lengths) > LENGTHS_MAX:
            del lengths[0]
        return tuple(hashes)


def answer_keys(claim: Claim, answer: AnswerKeys, answer_id: str) -> CorrelationKeys:
    """Return the keys that match later calls to the interaction, once a call with this claim has been answered.

    `answer_id`: id by which a later call may continue from the answer; "" without one.
    """
    strong = tuple([_of_call(id_) for id_ in islice(answer.tool_ids, IDS_MAX)]) if answer.tool_ids else ()
    if answer_id:
        strong = (*strong, _of_answer(answer_id.encode()))
    session, echoed = claim.session, claim.keys.text
    said = json_text(answer.text)
    turn = turn_of(claim.last_turn, said)
    weak = (named(session.encode(), b"turn", turn),) if turn else ()
    lines: list[int] = []
    for each in lines_of(said):
        line = hash((session, each))
        if line not in echoed:
            lines.append(line)
            if len(lines) == LINES_GIVEN:
                break
    if answer.arguments:
        tasks = [
            task for each in find_lines(json_text(answer.arguments)) if (task := hash((session, each))) not in echoed
        ]
        for task in tasks[:LINES_GIVEN]:
            lines += [task, task ^ _TASK]
    return CorrelationKeys(strong, weak, tuple(lines))


def claim_of_question(turns: list[Turn]) -> Claim | None:
    """Return what `claim_of_turns` does for one text of the user outside any session, alone or behind one instruction
    of the app, as in most requests. Return None for any other conversation."""
    first, last = turns[0], turns[-1]
    content = bytes(last.content)
    ids = last.tool_call_id or last.call_id or first.tool_call_id or first.call_id
    if len(turns) > 2 or last.role != "user" or ids or not content.startswith(b'"'):
        return None
    texts = [text_of(content)]
    if first is not last:
        if first.role not in INSTRUCTS:
            return None
        texts.append(text_of(bytes(first.content)))
    lines: list[int] = []
    for text in texts:
        for each in lines_of(text):
            line = hash(("", each))
            if line not in lines:
                lines += (line, line ^ _TASK)
    del lines[2 * LINES_MAX :]
    keys = CorrelationKeys((), (), tuple(lines), LINES_OF_A_NEW_TALK) if lines else NO_KEYS
    return Claim(named(content, b"asked", b""), 1, True, keys=keys, last_turn=name_of(texts[0]))


def claim_of_turns(turns: Turns, session: bytes, previous: bytes) -> Claim:
    """Return the claim of a conversation. `session` and `previous` (the continued answer) are b"" without one."""
    keys, begins = turns.keys, turns.begins
    name = hashed(b"session", session) if session else ""
    strong = [_of_call(id_) for id_ in keys.tool_ids]
    weak: list[str] = []
    known = [_of_answer(previous)] if previous else []
    if name:
        known.append(name)
    if begins is False:
        strong += known
    else:
        weak += known
    if turns.answered and not known and begins:
        weak.append(name_of_questions(turns.questions[: turns.answered], b"asked", b""))
    if keys.turn:
        weak.append(named(name.encode(), b"turn", keys.turn))
    is_new = not keys.turn and not turns.answered
    lines = [hash((name, line)) for line in keys.lines]
    if is_new:
        lines = [each for line in lines for each in (line, line ^ _TASK)]
    id_ = _named(turns, session, previous, strong)
    if not id_ and not weak and not lines:
        return Claim(begins=begins)
    carried = CorrelationKeys(tuple(strong), tuple(weak), tuple(lines), LINES_OF_A_NEW_TALK if is_new else 1)
    return Claim(id_, turns.stage(), begins, keys=carried, session=name, last_turn=keys.last_turn)


def _named(turns: Turns, session: bytes, previous: bytes, strong: list[str]) -> str:
    """Return the name that the conversation's interaction has if it is new."""
    if turns.questions and previous:
        return name_of_questions(turns.questions[-1:], b"after", previous)
    if turns.questions:
        # A session may lose its first turns. Without a session, all questions so far tell conversations apart.
        return name_of_questions(turns.questions[-1:] if session else turns.questions, b"asked", session)
    if previous:
        return hashed(b"after", previous)
    return hashed(b"amid", strong[0].encode()) if strong else ""


def _of_call(id: bytes) -> str:
    return hashed(b"tool", id)


def _of_answer(id: bytes) -> str:
    return hashed(b"answer", id)


def _session(headers: Mapping[bytes, bytes], fields: Fields) -> bytes:
    """Return the session that the request names, b"" without one or if it is no name: clients promise no format."""
    if headers:
        for name in SESSION_HEADERS:
            value = headers.get(name)
            if value is not None:
                return value if _is_id(value) else b""
    if not (fields.metadata or fields.conversation or fields.prompt_cache_key or fields.session_id):
        return b""
    for raw in (fields.session_id, fields.conversation):
        if len(raw) <= ID_LENGTH_MAX and (found := _ID_IN_JSON.search(raw)) is not None:
            return found[1]
    found = _SESSION_IN_METADATA.search(fields.metadata) or _OWN_CACHE_KEY.fullmatch(fields.prompt_cache_key)
    return found[1] if found is not None else b""


def _said(headers: Mapping[bytes, bytes], found: Claim) -> Claim:
    """Return the claim by the client's own headers. An id replaces the whole claim that was `found`; a stage or an end
    replaces that part."""
    claim = found
    if (id_ := headers.get(_ID)) is not None:
        if not _is_id(id_):
            raise _bad(_ID, f"the id of an interaction has 1 to {ID_LENGTH_MAX} bytes of printable characters")
        claim = Claim(hashed(b"said", id_), explicit=True)
    if (stage := headers.get(_STAGE)) is not None:
        number = int(stage) if re.fullmatch(rb"[0-9]{1,6}", stage) else 0
        if not 1 <= number <= STAGE_MAX:
            raise _bad(_STAGE, f"a stage is a whole number from 1 (the first call of an interaction) to {STAGE_MAX}")
        claim = replace(claim, stage=number)
    if (end := headers.get(_END)) is not None:
        ends = _FLAGS.get(end.lower())
        if ends is None:
            raise _bad(_END, "true or false is expected")
        claim = replace(claim, ends=ends)
    return claim


def _bad(header: bytes, message: str) -> ApiError:
    return ApiError(Reason.INVALID_REQUEST, f"'{header.decode()}': {message}", param=header.decode())


def _is_id(value: bytes) -> bool:
    if not 0 < len(value) <= ID_LENGTH_MAX:
        return False
    try:
        return value.decode("utf-8").isprintable()
    except UnicodeDecodeError:
        return False
