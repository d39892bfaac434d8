"""Requests and rooms for the tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import count
from typing import Any

from policies.admission.named import named_policy
from policies.admission.policy import Policy
from policies.capacity.obstacle import Blocked, Obstacle
from policies.orders.registry import POLICIES
from policies.placements.contract import EngineLoad
from policies.request import NO_CLAIM, Claim, Flow, Progress, Request

__all__ = ["NoRoom", "Room", "make_request", "policy_with"]

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
    prefix: tuple[int, ...] = (),
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
        claim=claim,
        system_tokens=system,
        prefix=prefix,
        progress=Progress(expected, reserved),
    )


def policy_with(name: str, *, flows_max: int = 100_000, **settings: Any) -> Policy:
    """The policy of this name with those of the settings that it has."""
    entry = POLICIES[name]
    structs = [entry.params] if entry.placement_params is None else [entry.params, entry.placement_params]
    known = {field.name for struct in structs for field in fields(struct)}
    return named_policy(name, flows_max=flows_max, **{one: value for one, value in settings.items() if one in known})


class OneEngine:
    """How full is it?"""

    name = "b"

    def kv_fraction(self) -> float:
        return 0.0


class Room:
    """An engine in which everything fits, as an order and as a policy see it."""

    def place(self, request: Request) -> str | Blocked:
        return "b"

    def with_room(self, request: Request) -> Sequence[EngineLoad] | Blocked:
        return (OneEngine(),)

    def obstacle_at(self, request: Request, engine: str) -> Obstacle | None:
        return None

    def loads(self) -> dict[str, int]:
        return {"b": 0}


class NoRoom(Room):
    """An engine in which nothing fits."""

    def place(self, request: Request) -> str | Blocked:
        return Blocked(request, {"b": Obstacle.SLOTS})

    def with_room(self, request: Request) -> Sequence[EngineLoad] | Blocked:
        return Blocked(request, {"b": Obstacle.SLOTS})

    def obstacle_at(self, request: Request, engine: str) -> Obstacle | None:
        return Obstacle.SLOTS
