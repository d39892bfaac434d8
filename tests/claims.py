"""The claim of a request, read as the pipeline reads it."""

from __future__ import annotations

from gateway.request.body.payload import NO_FIELDS, Payload
from gateway.request.interaction_claim import ClaimReader
from policies.request import Claim, Flow


def claim_of(
    by: ClaimReader, headers: list[tuple[bytes, bytes]], payload: Payload, flow: Flow, *, generates: bool = True
) -> Claim:
    conversation = payload.conversation if generates else NO_FIELDS.messages
    return by.read(dict(reversed(headers)), payload, conversation, flow)[0]
