"""What has an admission engine learned that a restart should not lose? A snapshot of its interactions and its
policy.
"""

from __future__ import annotations

from typing import Any, Final

from policies.admission.engine import AdmissionEngine
from policies.plain_data import Learned, fields

VERSION: Final = 2

Read = list[tuple[Learned, Any]]
"""The parts of an admission engine that learn, each with what was read for it."""


def snapshot(engine: AdmissionEngine) -> dict[str, object]:
    """What was learned, as plain data that JSON can represent."""
    learned = {name: part.snapshot() for name, part in engine.policy.order.learned.items()}
    return {"version": VERSION, "interactions": engine.interactions.paces.snapshot(), "policy": learned}


def read(engine: AdmissionEngine, learned: object) -> Read:
    """What `adopt` takes of a snapshot. ValueError, saying why, if it is not valid."""
    version, interactions, policy = fields(learned, "version", "interactions", "policy")
    if version != VERSION:
        raise ValueError(f"version {version!r:.20}; this is version {VERSION}")
    own, paces = engine.policy.order.learned, engine.interactions.paces
    found = zip(own.values(), fields(policy, *own), strict=True) if policy else ()
    return [(paces, paces.read(interactions)), *[(part, part.read(content)) for part, content in found]]


def adopt(read: Read) -> None:
    """Take over what was seen more of in a snapshot: of another gateway, or of this one before a restart."""
    for part, theirs in read:
        part.adopt(theirs)
