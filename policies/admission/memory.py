"""What has an admission engine learned that a restart should not lose? A snapshot of its interactions and its
policy.
"""

from __future__ import annotations

from typing import Final

from policies.admission.engine import AdmissionEngine
from policies.plain_data import Learned, fields

__all__ = ["VERSION", "adopt", "restore", "snapshot"]

VERSION: Final = 2


def snapshot(engine: AdmissionEngine) -> dict[str, object]:
    """What was learned, as plain data that JSON can represent."""
    learned = {name: part.snapshot() for name, part in engine.policy.order.learned.items()}
    return {"version": VERSION, "interactions": engine.interactions.paces.snapshot(), "policy": learned}


def restore(engine: AdmissionEngine, learned: object) -> None:
    """Continue from a snapshot. ValueError, saying why, if it is not valid; then nothing has changed."""
    _take(engine, learned, adopts=False)


def adopt(engine: AdmissionEngine, learned: object) -> None:
    """Take over from another gateway's snapshot what it has seen more of.

    ValueError, saying why, if it is not valid; then nothing has changed.
    """
    _take(engine, learned, adopts=True)


def _take(engine: AdmissionEngine, learned: object, *, adopts: bool) -> None:
    done: list[tuple[Learned, object]] = []
    try:
        for part, content in _parts(engine, learned):
            before = part.snapshot()
            if adopts:
                part.adopt(content)
            else:
                part.restore(content)
            done.append((part, before))
    except ValueError:
        for part, before in done:
            part.restore(before)
        raise


def _parts(engine: AdmissionEngine, learned: object) -> list[tuple[Learned, object]]:
    """The parts of the admission engine that learn, each with its content of the snapshot."""
    version, interactions, policy = fields(learned, "version", "interactions", "policy")
    if version != VERSION:
        raise ValueError(f"version {version!r:.20}; this is version {VERSION}")
    own = engine.policy.order.learned
    found = zip(own.values(), fields(policy, *own), strict=True) if policy else ()
    return [(engine.interactions.paces, interactions), *found]
