"""Is the KV cache overloaded? A state with hysteresis, on which throttling depends; no request rate matters.

Overload begins when the occupancy, measured or projected, reaches `enter`, and ends when it falls below `leave`. Each
state lasts at least `dwell_s`, so that the state does not change with every request that ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policies.capacity.ledger import BackendLedger
from policies.capacity.obstacle import Blocked, Obstacle
from policies.request import Pressure
from policies.settings import SettingError, check_bounds, setting


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """Occupancies at which overload begins and ends."""

    enter: float = setting(
        0.95, "Share of the KV cache, in use or expected to be, from which the pool is overloaded.", above=0, most=1
    )
    leave: float = setting(0.85, "Share below which it no longer is. At most `enter`.", above=0, most=1)
    dwell_s: float = setting(1.0, "Shortest time in either state.", least=0, most=3600)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.leave > self.enter:
            message = f"{self.leave:g} is more than enter ({self.enter:g}): overload would end before it begins"
            raise SettingError("leave", message)


class Overload:
    """The overload of a pool. `observe` changes the state; `seen` does not."""

    def __init__(self, settings: OverloadSettings) -> None:
        self.settings = settings
        self.pressure = Pressure(False, "")
        self.since_s = float("-inf")

    def observe(self, backends: Iterable[BackendLedger], blocked: Blocked | None, now: float) -> Pressure:
        """Update the state at an event, and return it."""
        self.pressure, self.since_s = self.seen(backends, blocked, now)
        return self.pressure

    def seen(self, backends: Iterable[BackendLedger], blocked: Blocked | None, now: float) -> tuple[Pressure, float]:
        """Return the state that an event would find now, and its beginning.

        `blocked`: the head and its obstacles; None if nothing waits.

        A pool is as full as its emptiest open backend. Overload begins only while a request waits.
        """
        is_active, settings = self.pressure.overloaded, self.settings
        if blocked is None and not is_active:
            return self.pressure, self.since_s
        # One engine below `enter` is enough to rule out that overload begins.
        occupancy, known = _fullness(backends, blocked, now, enough=0.0 if is_active else settings.enter)
        turns = occupancy < settings.leave if is_active else occupancy >= settings.enter
        since_s = min(self.since_s, now)  # if a clock was set back, the state has lasted since `now`
        if turns and now - since_s >= settings.dwell_s:
            is_active, since_s = not is_active, now
        if not is_active:
            return Pressure(False, ""), since_s
        bounds = f"overload begins at {settings.enter:.0%}, ends below {settings.leave:.0%}"
        return Pressure(True, f"{known} {occupancy:.0%} full; {bounds}"), since_s


def _fullness(
    backends: Iterable[BackendLedger], blocked: Blocked | None, now: float, *, enough: float
) -> tuple[float, str]:
    """Return the occupancy of the emptiest open backend (of the emptiest in service if none is open) and its source.

    The first open backend that is emptier than `enough` ends the search.
    """
    least: tuple[bool, tuple[float, str]] | None = None
    for ledger in backends:
        if not ledger.healthy:
            continue
        obstacle = blocked.obstacles.get(ledger.name) if blocked is not None else None
        level = ledger.occupancy(blocked.request if blocked is not None else None, obstacle, now)
        rank = obstacle is Obstacle.CLOSED, level
        if level[0] < enough and not rank[0]:
            return level
        least = rank if least is None else min(least, rank)
    return (0.0, "no backend in service,") if least is None else least[1]
