"""The store's script as a test asks it: Redis runs the same one for replicas, and the hub for workers."""

from __future__ import annotations

import msgspec

from gateway.storage.hub.script_store import ScriptStore
from policies.replicas.messages import ReplicaReport, ReplicaView

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplicaView).decode


class TypedScriptStore:
    """The store of the gateways of one pool, or of the limits and interactions of all pools."""

    def __init__(self) -> None:
        self._script = ScriptStore()

    def exchange(self, me: str, number: int, report: ReplicaReport, now_ms: int) -> ReplicaView:
        """Return the reply to the report of one gateway. Raise ValueError for a number that cannot be counted."""
        return _decode(self._script.exchange(me, number, _encode(report), now_ms))

    def leave(self, me: str) -> None:
        """Remove a gateway that is gone, with its part of every engine."""
        self._script.leave(me)
