"""How does an answer get onto the wire?"""

from __future__ import annotations

import asyncio

from backends.simulated.shapes import SimulatedAnswer


class Output:
    """Where one answer goes: the stream's socket, or nowhere until it is whole. `done`: nothing more comes."""

    def __init__(self, answer: SimulatedAnswer) -> None:
        self.answer = answer
        self.request_ids: list[str] = []
        self.choices_left = len(answer.emitted)
        self.done = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def write(self, events: bytes) -> None:
        """One HTTP chunk for some events. For a slow reader the transport buffers, at most a context length of events.

        This is what runs for every token: it writes to the transport itself, without a task switch.
        """
        if self.transport is None or not events or self.transport.is_closing():
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(events), events))
