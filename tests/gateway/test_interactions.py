"""Which calls belong to one answer, as the requests of real clients show it; and what is no such claim."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from backends.answers.answer import AnswerKeys
from gateway.config.sections.apps import InteractionRules
from gateway.http.errors import ApiError
from gateway.request.apis import CHAT, COMPLETIONS, RESPONSES
from gateway.request.body.payload import Payload, read_json
from gateway.request.interaction_claim import LENGTHS_MAX, PROMPTED_FLOWS_MAX, ClaimReader, answer_keys
from policies.request import NO_CLAIM, Claim, Flow
from tests.claims import claim_of

FLOW = Flow("tenant", "default", "u")


def asked(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


USER = asked("Which files are here?")
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "ls"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "a.py"}
SAID = said("a.py")
TERSE = "You are terse."
SYSTEM = {"role": "system", "content": TERSE}


def reader(**rules: Any) -> ClaimReader:
    return ClaimReader(InteractionRules(**rules), {})


def payload(body: dict[str, Any]) -> Payload:
    """As the API reads it that has these fields."""
    api = RESPONSES if "input" in body else COMPLETIONS if "prompt" in body else CHAT
    return read_json(json.dumps(body).encode(), api)


def claim(body: dict[str, Any], by: ClaimReader | None = None, flow: Flow = FLOW, **headers: str) -> Claim:
    fields = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return claim_of((by or reader()), fields, payload(body), flow, generates=True)


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def blocks(*contents: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(contents)}


TOOL_USE = blocks({"type": "tool_use", "id": "t", "name": "ls", "input": {}}, role="assistant")
TOOL_RESULT = blocks({"type": "tool_result", "tool_use_id": "t", "content": "a.py"})
REMINDED = blocks({"type": "tool_result", "tool_use_id": "t", "content": "a.py"}, {"type": "text", "text": "Be quick."})
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which files?"}]}
REASONING = {"type": "reasoning", "summary": []}
FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "a.py"}
USED, CALLED, RAN = [TOOL_USE, TOOL_RESULT], [CALLS, RESULT], [REASONING, FUNCTION_CALL, OUTPUT]
TWICE = [FUNCTION_CALL, FUNCTION_CALL, OUTPUT, OUTPUT]
REMINDER = asked("<reminder>Be quick.</reminder>")
REMINDS = [*CALLED, REMINDER]
QUOTED, FORGED = 'say "hi", \\ please', '","cache_control":{"type":"ephemeral"}'
MARKED = blocks({"type": "text", "text": QUOTED, "cache_control": {"type": "ephemeral", "ttl": "1h"}})

TALKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "chat": ("a1+ a2 a3", [chat(SYSTEM, USER, *turns) for turns in ([], CALLED, [*CALLED * 2, RESULT])]),
    "messages": ("a1+ a2 a3", [chat(USER, *turns) for turns in ([], USED, [*USED, TOOL_USE, REMINDED])]),
    "responses": ("a1+ a2 a3", [{"input": [ITEM, *turns]} for turns in ([], RAN, [*RAN, *TWICE])]),
    "a turn of the user": ("a2 b1+", [chat(USER, *CALLED), chat(USER, *CALLED, SAID, asked("And now?"))]),
    "a question in two talks": ("a1+ b1+", [chat(asked(topic), SAID, USER) for topic in ("Rome", "Athens")]),
    "in two sessions": ("a1+ b1+ a1+", [chat(USER, session_id=session) for session in ("s1", "s2", "s1")]),
    "marks for the engine's cache": ("a1+ a1+ a2", [chat(asked(QUOTED)), chat(MARKED), chat(asked(QUOTED), *USED)]),
    "a forged mark": ("a1+ b1+", [chat(blocks({"type": "text", "text": text})) for text in (FORGED, "")]),
    "an answer begun": ("a1+ a1?", [chat(USER), chat(USER, said("The files are"))]),
    "words beside a result": ("a1+ a2 a3", [chat(USER), chat(USER, *REMINDS), chat(USER, *REMINDS, *CALLED)]),
    "words before a result": ("a1+ a2", [chat(USER), chat(USER, CALLS, REMINDER, RESULT)]),
    "the same words alone": ("a1+ b1+", [chat(USER), chat(USER, *CALLED, SAID, REMINDER)]),
}
"""Calls by what they show: the letter of the interaction and the stage of each. `+` begins it, `?` may begin it."""


@pytest.mark.parametrize("name", TALKS)
def test_calls_are_of_the_interaction_and_stage_that_their_turns_show(name: str) -> None:
    expected, calls = TALKS[name]
    by = reader()
    claims = [claim(body, by) for body in calls]
    letters = dict(zip(dict.fromkeys(each.id for each in claims), "abc", strict=False))
    signs = {True: "+", False: "", None: "?"}
    assert " ".join(f"{letters[each.id]}{each.stage}{signs[each.begins]}" for each in claims) == expected
    assert not any(each.explicit or each.ends for each in claims)


@pytest.mark.parametrize("header", ["x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"])
def test_a_session_keeps_its_interactions_apart_and_survives_a_history_cut_short(header: str) -> None:
    fields = [(header.encode(), b"s")]
    by = reader()
    long = payload(chat(asked("Hi"), SAID, USER))
    cut = payload(chat(USER, *CALLED))
    claims = [claim_of(by, fields, each, FLOW, generates=True) for each in (long, cut)]
    assert claims[0].id == claims[1].id
    assert [each.begins for each in claims] == [True, False]
    assert claim_of(by, [], cut, FLOW, generates=True).id != claims[0].id


@pytest.mark.parametrize(
    "body",
    [
        *({"messages": {}}, {"messages": [1]}, {"messages": [{"role": 5}]}, {"input": {"a": 1}}, {"messages": []}, {}),
        *({"prompt": several} for several in (["a", "b"], [1, 2], [[1], [2]])),
    ],
    ids=str,
)
def test_what_is_no_conversation_claims_nothing(body: dict[str, Any]) -> None:
    assert claim(body) == NO_CLAIM


def test_what_is_embedded_is_no_question() -> None:
    assert claim_of(reader(), [], payload({"input": "a text"}), FLOW, generates=False) is NO_CLAIM


def test_the_clients_own_word_comes_first() -> None:
    by_header = claim(chat(USER), x_fairgate_interaction="mine", x_fairgate_stage="7", x_fairgate_end="true")
    assert by_header == Claim(claim({}, x_fairgate_interaction="mine").id, 7, ends=True, explicit=True)
    assert by_header.id not in (claim(chat(USER)).id, "mine")
    ended = claim(chat(USER, CALLS, RESULT), x_fairgate_end="1")
    assert ended == replace(claim(chat(USER, CALLS, RESULT)), ends=True)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        *(({"x_fairgate_interaction": id}, "x-fairgate-interaction") for id in ("", "x" * 257, "a\tb", "\xff")),
        *(
            ({"x_fairgate_stage": stage}, "x-fairgate-stage")
            for stage in ("two", "0", "-1", "1.5", "9" * 5000, "٣".encode().decode("latin-1"))
        ),
        ({"x_fairgate_end": "perhaps"}, "x-fairgate-end"),
    ],
)
def test_a_bad_claim_in_so_many_words_is_refused(headers: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        claim(chat(USER), **headers)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
    claim(chat(USER), reader(headers=False), **headers)


@pytest.mark.parametrize("session", ["", "x" * 300, "a\tb", "\xff\xfe"])
def test_a_bad_session_header_is_not_trusted_and_no_error(session: str) -> None:
    assert claim(chat(USER), session_id=session) == claim(chat(USER))


def test_every_rule_can_be_switched_off_for_an_app() -> None:
    by = ClaimReader(InteractionRules(), {"quiet": InteractionRules(headers=False, content=False, prefixes=False)})
    quiet = Flow("tenant", "quiet")
    assert claim(chat(USER, *CALLED), by, quiet, x_fairgate_interaction="mine", session_id="s") == NO_CLAIM
    assert claim({"prompt": "abc"}, by, quiet) == NO_CLAIM
    assert claim(chat(USER), by).id
    no_sessions = reader(sessions=False)
    assert claim(chat(USER), no_sessions, session_id="s") == claim(chat(USER))


def answered(*tool_ids: str, text: str = "", arguments: str = "") -> AnswerKeys:
    """What is kept of an answer that says this and calls these tools."""
    keys = AnswerKeys()
    keys.tool_ids = {id_.encode(): None for id_ in tool_ids}
    keys.text, keys.arguments = (json.dumps(each)[1:-1].encode() for each in (text, arguments))
    return keys


def test_a_response_that_is_gone_on_from_is_found_by_its_id() -> None:
    first = claim({"input": "Which files?"})
    assert (first.stage, first.begins) == (1, True)
    [gone_on_by] = answer_keys(first, AnswerKeys(), "resp_1").strong
    second = claim({"previous_response_id": "resp_1", "input": [OUTPUT]})
    assert second.begins is False
    assert gone_on_by in second.keys.strong
    new = claim({"previous_response_id": "resp_1", "input": "And now?"})
    assert (new.stage, new.begins) == (1, True)
    assert new.id != first.id
    assert gone_on_by in new.keys.weak, "a person may go on as well, but not at an agent's pace"
    assert gone_on_by not in new.keys.strong


BROUGHT_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "chat": (chat(USER, CALLS, RESULT), "c"),
    "messages": (chat(USER, TOOL_USE, TOOL_RESULT), "t"),
    "messages and text": (chat(USER, TOOL_USE, REMINDED), "t"),
    "responses": ({"input": [ITEM, REASONING, FUNCTION_CALL, OUTPUT]}, "c"),
    "all else is cut": (chat(RESULT), "c"),
    "reminder": (chat(USER, CALLS, RESULT, REMINDER), "c"),
    "in a text": (chat(USER, said("Calling tools: [{'id': 'call-1'}]"), USER), "call-1"),
    "in JSON in a text": (chat(USER, said('Calling tools: [{"id": "call-2"}]'), USER), "call-2"),
}


@pytest.mark.parametrize("name", BROUGHT_BACK)
def test_whoever_brings_the_id_of_a_call_back_proves_that_it_was_answered(name: str) -> None:
    body, id_ = BROUGHT_BACK[name]
    assert claim(body).keys.strong == answer_keys(NO_CLAIM, answered(id_), "").strong


@pytest.mark.parametrize("session", ["", "s"])
def test_the_turn_of_a_model_that_calls_its_tools_in_text_is_known_again(session: str) -> None:
    headers = {"x_session_id": session} if session else {}
    thought = "THOUGHT: I look at the files first.\n\nls -la"
    first = claim(chat(SYSTEM, USER), **headers)
    own_keys = answer_keys(first, answered(text=thought), "")
    seen = asked("Observation: a.py")
    step = chat(SYSTEM, USER, said(thought), seen)
    shown = claim(step, **headers).keys
    assert (first.session or first.id) in shown.weak
    assert set(own_keys.weak) <= set(shown.weak)
    assert own_keys.text
    assert set(own_keys.text) <= set(shown.text)
    cut = claim(chat(said([{"type": "text", "text": thought + "\nmore"}]), seen), **headers)
    assert set(own_keys.text) <= set(cut.keys.text), "in another form, without what came before"
    other = claim(step, x_session_id="other").keys
    assert not set(own_keys.weak) & set(other.weak)
    assert not set(own_keys.text) & set(other.text)


def test_what_was_handed_to_a_tool_may_be_the_task_of_another_agent() -> None:
    task = "Look up who changed the parser last."
    handed_over = answered("c", arguments=json.dumps({"input": task}))
    own_keys = answer_keys(claim(chat(SYSTEM, USER)), handed_over, "")
    for own in (task, f"You have been given a task by your manager:\n{task}\nBegin now."):
        keys = claim(chat(SYSTEM, asked(own))).keys
        assert len(set(own_keys.text) & set(keys.text)) >= keys.text_min
    same = claim(chat(SYSTEM, asked(task)))
    assert not answer_keys(same, handed_over, "").text, "the question itself is no task"


def test_a_line_that_was_in_the_prompt_is_not_given_out() -> None:
    rule = "Answer with exactly one command in a block."
    first = claim(chat(asked(rule)))
    assert not answer_keys(first, answered(text=rule), "").text
    assert answer_keys(first, answered(text="I list the files that are there now."), "").text


@pytest.mark.parametrize(
    ("fields", "is_one"),
    [
        ({"metadata": {"session_id": "s"}}, True),
        ({"session_id": "s"}, True),
        ({"conversation": "conv_1"}, True),
        ({"conversation": {"id": "conv_1"}}, True),
        ({"prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53"}, True),
        ({"prompt_cache_key": "our-app-v2"}, False),
        ({"conversation": {}}, False),
        ({"metadata": {"session_id": 5}}, False),
    ],
    ids=str,
)
def test_a_session_may_stand_in_the_body(fields: dict[str, Any], is_one: bool) -> None:
    found = claim(chat(USER, **fields))
    assert bool(found.session) == is_one
    assert (found.session in found.keys.weak) == is_one
    assert (found.session in claim(chat(USER, *CALLED, **fields)).keys.strong) == is_one
    assert not claim(chat(USER, **fields), reader(sessions=False)).session


def extends(prompt: str, by: ClaimReader, flow: Flow = FLOW) -> tuple[int, ...]:
    return claim({"prompt": prompt}, by, flow).extends


def test_a_raw_prompt_extends_an_earlier_one_of_its_flow_and_no_other() -> None:
    by = reader()
    template = "You are terse. " * 40
    first = extends(template + "Q: one? A:", by)
    other = extends(template + "Q: two? A:", by)
    longer = extends(template + "Q: one? A: 1. Q: and then? A:", by)
    assert first[-1] in longer[:-1]
    assert other[-1] not in longer
    assert first[-1] not in other
    assert extends(template + "Q: one? A:", by)[-1] == first[-1]


def test_lengths_of_raw_prompts_are_remembered_within_a_bound() -> None:
    by = reader()
    for length in range(1, 3 * LENGTHS_MAX):
        assert len(extends("x" * length, by)) <= LENGTHS_MAX + 1
    for number in range(PROMPTED_FLOWS_MAX + 10):
        extends("x", by, Flow("tenant", "default", f"u{number}"))
    assert len(by._lengths) == PROMPTED_FLOWS_MAX


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat(SYSTEM, USER, {"role": "developer", "content": "Brief."}), len(TERSE) + len("Brief.") + 4),
        ({**chat(USER), "system": TERSE}, len(TERSE) + 2),
        ({"input": "x", "instructions": TERSE}, len(TERSE) + 2),
        (chat(USER), 0),
    ],
)
def test_instructions_of_the_app_are_counted_apart(body: dict[str, Any], expected: int) -> None:
    found = payload(body)
    _, instruction_bytes = reader().read({}, found, found.conversation, FLOW)
    assert instruction_bytes == expected


def test_an_id_tells_nothing_of_what_the_client_wrote() -> None:
    secret = "patient 4711 has the flu"
    for found in (claim(chat(asked(secret))), claim({}, x_fairgate_interaction=secret)):
        assert len(found.id) == 16
        assert set(found.id) <= set("0123456789abcdef")
