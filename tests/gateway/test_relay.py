"""A request and its answer end once."""

from __future__ import annotations

import pytest

from gateway.http.headers import Head
from gateway.proxy.relay import Relay
from gateway.proxy.request_context import RequestContext
from gateway.telemetry.record import NO_SERVICE


def test_a_second_end_is_a_fault_and_changes_nothing() -> None:
    relay = Relay(RequestContext("", Head("/", [])), b"")
    relay.context.ended("failed", "backend_failed", NO_SERVICE, 0.0)
    with pytest.raises(AssertionError):
        relay.end("completed", "")
    assert (relay.context.outcome, relay.context.reason) == ("failed", "backend_failed")
