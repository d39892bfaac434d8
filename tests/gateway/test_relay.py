"""The states of a request and its answer: what may follow what, and that everything ends once."""

from __future__ import annotations

import pytest

from gateway.http.headers import Head
from gateway.proxy.relay import NEXT, IllegalStep, Phase, Relay
from gateway.proxy.request_context import RequestContext


def relay_in(phase: Phase) -> Relay:
    relay = Relay(RequestContext("", Head("/", [])), b"")
    relay.phase = phase
    return relay


def test_every_state_has_a_row_and_all_but_the_last_can_end() -> None:
    assert NEXT.keys() == set(Phase)
    assert [phase for phase in Phase if Phase.ENDED not in NEXT[phase]] == [Phase.ENDED]


def test_what_a_client_has_seen_is_never_tried_again() -> None:
    assert NEXT[Phase.RELAYED] == {Phase.ENDED}
    assert Phase.WAITING in NEXT[Phase.SENT] & NEXT[Phase.HELD] & NEXT[Phase.STREAMED]


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("after", Phase)
def test_a_step_that_the_table_lacks_changes_nothing(before: Phase, after: Phase) -> None:
    relay = relay_in(before)
    if after in NEXT[before]:
        relay.enter(after)
        assert relay.phase is after
    else:
        with pytest.raises(IllegalStep, match=f"is {before.value}: it cannot be {after.value}"):
            relay.enter(after)
        assert relay.phase is before
