"""The claim of a request, read as the pipeline reads it."""

from __future__ import annotations

from gateway.request.body.payload import Payload
from gateway.request.conversation.turns import NO_TURNS
from gateway.request.interaction_claim import ClaimReader
from policies.request import Claim, Flow


def claim_of(
    by: ClaimReader, headers: list[tuple[bytes, bytes]], payload: Payload, flow: Flow, *, generates: bool = True
) -> Claim:
    return by.read(dict(reversed(headers)), payload, payload.turns() if generates else NO_TURNS, flow)
