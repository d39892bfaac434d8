"""Requests and rooms for the tests of policies."""

from __future__ import annotations

from itertools import count

from policies.request import NO_CLAIM, Claim, Flow, Request

__all__ = ["NoRoom", "Room", "make_request"]

_serial = count()


def make_request(
    tenant: str = "a",
    *,
    id: str | None = None,
    app: str = "",
    user: str = "",
    weight: float = 1.0,
    prompt: int = 10,
    output_max: int = 100,
    arrived_s: float = 0.0,
    body_bytes: int = 0,
    sequences: int = 1,
    streamed: bool = True,
    expected: float = 0.0,
    reserved: int = 0,
    claim: Claim = NO_CLAIM,
    system: int = 0,
) -> Request:
    return Request(
        id if id is not None else f"{tenant}-{next(_serial)}",
        Flow(tenant, app, user),
        weight,
        prompt,
        output_max,
        arrived_s,
        sequences=sequences,
        body_bytes=body_bytes,
        streamed=streamed,
        output_tokens_expected=expected,
        output_tokens_reserved=reserved,
        claim=claim,
        system_tokens=system,
    )


class Room:
    """A cluster in which everything fits."""

    def place(self, request: Request) -> str | None:
        return "b"

    def fits(self, request: Request, backend: str) -> bool:
        return True

    def loads(self) -> dict[str, int]:
        return {"b": 0}


class NoRoom:
    """A cluster in which nothing fits."""

    def place(self, request: Request) -> str | None:
        return None

    def fits(self, request: Request, backend: str) -> bool:
        return False

    def loads(self) -> dict[str, int]:
        return {"b": 0}
