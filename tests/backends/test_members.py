"""A member is found in a JSON text that is never held whole, wherever the text is cut and whatever it says."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.answers.members import CANDIDATES_MAX, MemberFinder

USAGE = {"prompt_tokens": 5, "details": {"cached": [1, {"x": "}"}]}}
nasty = st.sampled_from(['"', "\\", '\\"', "{", "}]", '"usage":{"a":1}', '"usage', "usage", 'usage":', "\u2028", ","])
texts = st.lists(st.one_of(nasty, st.text(max_size=5)), max_size=6).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(texts, st.just("usage")), inner, max_size=4),
    ),
    max_leaves=20,
)
members = st.dictionaries(texts.filter(lambda name: name != "usage"), values, max_size=4)


def found(text: bytes, cuts: list[int], depth: int = 1, name: str = "usage") -> Any:
    finder = MemberFinder({(depth, name)})
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        finder.feed(text[begin:end])
    return finder.values().get(name)


@settings(max_examples=100)
@given(members, members, st.lists(st.integers(0, 10_000), max_size=20), st.booleans(), st.sampled_from([None, 1]))
def test_it_is_what_a_parser_finds(
    before: dict[str, Any], behind: dict[str, Any], cuts: list[int], is_ascii: bool, indent: int | None
) -> None:
    whole = {**before, "usage": USAGE, **{name: value for name, value in behind.items() if name not in before}}
    assert found(json.dumps(whole, ensure_ascii=is_ascii, indent=indent).encode(), cuts) == USAGE
    del whole["usage"]
    assert found(json.dumps(whole, ensure_ascii=is_ascii, indent=indent).encode(), cuts) is None


@pytest.mark.parametrize("text", [b'{"a":{"usage":{"x":1}}}', b'[{"usage":{"x":1}}]', b'{"a":["usage",{"b":1}]}'])
def test_elsewhere_it_is_another_one(text: bytes) -> None:
    assert found(text, list(range(len(text)))) is None


def test_it_is_found_deeper_where_that_is_asked() -> None:
    text = b'event: x\ndata: {"response":{"a":{"usage":{"x":1}},"usage":{"x":2}},"type":"t"}'
    assert found(text, [], depth=2) == {"x": 2}
    assert found(text, [], name="type") == "t"


BROKEN = [b"", b"{", b'"', b"\\", b'{"usage":', b'{"usage":{', b'{"usage":{"a":}}', b'{"usage":' + b"[" * 50_000]
BROKEN += [b'{"usage":' + b"9" * 9000 + b"}", b'{"usage":{"a":"' + b"x" * 9000 + b'"}}', b"}" * 9000, b"\xff" * 9000]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: str(text[:20]))
def test_what_cannot_be_read_is_nothing(text: bytes) -> None:
    assert found(text, [1, 2, 3, 5000]) is None


def test_what_is_no_json_is_read_alike_wherever_it_is_cut() -> None:
    text = b'"a\\{" \\{ {"b":\\"} "usage":{"x":1}}' + b" " * 60
    whole = found(text, [])
    assert all(found(text, [cut]) == whole for cut in range(len(text)))


def test_the_first_one_stands() -> None:
    assert found(b'{"usage":{"x":1},"usage":{"x":2}}', []) == {"x": 1}


def test_too_many_that_are_not_it_end_the_search() -> None:
    other = b'{"a":[' + b'{"usage":{}},' * (CANDIDATES_MAX + 1) + b'0],"usage":{"x":1}}'
    assert found(other, []) is None


def test_it_holds_little_of_what_it_has_read() -> None:
    piece = b'{"logprob":-0.5,"decoded_token":"\\"{"},' * 10_000
    finder = MemberFinder({(1, "usage")})
    finder.feed(b'{"a":[')
    tracemalloc.start()
    for _ in range(10):
        finder.feed(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(piece)
    finder.feed(b'0],"usage":{"x":1}}')
    assert finder.values() == {"usage": {"x": 1}}
