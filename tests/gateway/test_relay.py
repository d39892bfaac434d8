"""The states of a request and its answer: what may follow what, and that everything ends once."""

from __future__ import annotations

import pytest

from gateway.http.headers import Head
from gateway.proxy.relay import ENDED, HELD, RELAYED, RETURNED, SENT, STREAMED, Phase, Relay
from gateway.proxy.request_context import RequestContext

EVENTS = (SENT, HELD, STREAMED, RELAYED, RETURNED, ENDED)


def test_every_state_is_reached_and_all_but_the_last_can_end() -> None:
    assert {after for event in EVENTS for after in event.values()} == set(Phase)
    assert {phase: Phase.ENDED for phase in Phase if phase is not Phase.ENDED} == ENDED


def test_what_a_client_has_seen_is_never_tried_again() -> None:
    assert [event for event in EVENTS if Phase.RELAYED in event] == [ENDED]
    assert RETURNED.keys() == {Phase.SENT, Phase.HELD, Phase.STREAMED}


def test_a_second_end_is_a_fault_and_changes_nothing() -> None:
    relay = Relay(RequestContext("", Head("/", [])))
    relay.phase = Phase.ENDED
    with pytest.raises(KeyError):
        relay.end("completed", "")
    assert (relay.phase, relay.context.outcome) == (Phase.ENDED, "")
