"""How shall the next answers go wrong? For tests of the proxy in front of the engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Faults"]


@dataclass(slots=True)
class Faults:
    """Set at any time, read at each generation request. The `*_next` count down one per request; None is off."""

    reset_next: int = 0
    """Reset the connection before the first byte of an answer."""
    garbage_next: int = 0
    """Answer with bytes that are not HTTP, then close."""
    refuse_next: int = 0
    """Answer 503 as a full engine does; streams that were already accepted are not touched."""
    refuse_in_stream_next: int = 0
    """Answer 200 and say 503 inside the stream, as vLLM does to a burst. Not streamed: a plain 503."""
    cut_body_next: int = 0
    """Close amid the body of an answer that is not streamed; its length was promised."""
    truncate_after_events: int | None = None
    """Close every stream after this many events, without an end."""
    stall_after_events: int | None = None
    """Write nothing to a stream after this many events, and keep it open."""
    is_still: bool = False
    """Make no step, and go on saying that all is well."""

    def take(self, name: str) -> bool:
        """Is this request one of the next `name`? Counts it."""
        left: int = getattr(self, name)
        if left <= 0:
            return False
        setattr(self, name, left - 1)
        return True
