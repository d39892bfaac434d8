"""Is the KV cache overloaded? A state with hysteresis: throttling goes by it, and by no request rate.

It turns on when the occupancy, measured or projected, reaches `enter`, and off when it falls below `leave`; in between
it stays as it is, and in each state for at least `dwell_s`, so that it does not flutter with every request that ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Obstacle
from policies.request import Request

__all__ = ["Overload", "OverloadSettings"]


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """When does overload begin and end? Parts of the KV capacity."""

    enter: float = 0.95
    leave: float = 0.85
    dwell_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.leave <= self.enter <= 1:
            raise ValueError(f"overload: 0 < leave <= enter <= 1 is needed, not leave {self.leave}, enter {self.enter}")
        if self.dwell_s < 0:
            raise ValueError(f"overload: dwell_s is {self.dwell_s}; it cannot be negative")


class Overload:
    """Is it overloaded, and why?"""

    def __init__(self, settings: OverloadSettings) -> None:
        self._settings = settings
        self._since_s = float("-inf")
        self.active = False
        self.reason = ""

    def observe(
        self, backends: Iterable[BackendLedger], head: Request | None, obstacle: Obstacle | None, now: float
    ) -> None:
        """Look at a pool, whose queue (if there is one) has this head, which waits for that.

        A pool is as full as the emptiest backend in service, and overload begins only while something waits.
        """
        if head is None and not self.active:
            return
        levels = [ledger.occupancy(head, obstacle, now) for ledger in backends if ledger.healthy]
        occupancy, known = min(levels, default=(0.0, "no backend in service,"))
        settings = self._settings
        turns = occupancy < settings.leave if self.active else occupancy >= settings.enter
        if now < self._since_s:
            self._since_s = now  # the clock was set back: the state has lasted for as long as is known
        if turns and now - self._since_s >= settings.dwell_s:
            self.active = not self.active
            self._since_s = now
        bounds = f"overload begins at {settings.enter:.0%}, ends below {settings.leave:.0%}"
        self.reason = f"{known} {occupancy:.0%} full; {bounds}" if self.active else ""
