"""How much is too much? Limits that are configured as numbers, and limits learned from what is usual."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Auto", "Ceiling", "Ceilings", "Percentile", "ThrottleSettings"]


class Percentile:
    """A running estimate of one percentile: the value below which a fraction `part` of all values lies. O(1), no
    memory.

    Each value moves the estimate by a small part of itself: up by p or down by 1 - p (stochastic approximation). The
    first values move it by more. No single value can move it far, however large it is.
    """

    __slots__ = ("part", "seen", "value")

    RATE = 0.05

    def __init__(self, part: float, value: float = 0.0, seen: int = 0) -> None:
        self.part = part
        self.value = value
        self.seen = seen

    def learn(self, value: float) -> None:
        self.seen += 1
        if self.seen == 1:
            self.value = value
            return
        step = max(self.RATE, 1.0 / self.seen) * max(self.value, 1.0)
        self.value = max(0.0, self.value + step * (self.part if value > self.value else self.part - 1.0))


@dataclass(frozen=True, slots=True)
class Auto:
    """A limit learned from its population's history: `factor` times a percentile of it, but at least `floor`."""

    floor: float
    percentile: float = 0.5
    factor: float = 8.0

    def __post_init__(self) -> None:
        if not (0 < self.percentile < 1 and self.factor >= 1 and self.floor > 0):
            raise ValueError(f"{self}: it needs 0 < percentile < 1, factor >= 1 and floor > 0")

    def of(self, learned: Percentile) -> float:
        return max(self.floor, self.factor * learned.value)


Ceiling = int | Auto | None
"""A number, or learned; None: no limit."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """How much may one member of a population start, request and take (in tokens) within a window?

    Learned limits are per unit of the tenant's weight.
    """

    starts: Ceiling = None
    requests: Ceiling = None
    tokens: Ceiling = None

    def __post_init__(self) -> None:
        for name in ("starts", "requests", "tokens"):
            ceiling = getattr(self, name)
            if isinstance(ceiling, int) and ceiling < 1:
                raise ValueError(f"a limit of {ceiling} {name} would refuse everybody; the least is 1")
        if isinstance(self.starts, int) and isinstance(self.requests, int) and self.starts > self.requests:
            raise ValueError(f"{self.starts} starts are more than the {self.requests} requests that are allowed")


USER = Ceilings(Auto(floor=20), Auto(floor=600), Auto(floor=4_000_000))
APP = Ceilings(
    Auto(floor=200, percentile=0.95, factor=4.0),
    Auto(floor=6_000, percentile=0.95, factor=4.0),
    Auto(floor=40_000_000, percentile=0.95, factor=4.0),
)


@dataclass(frozen=True, slots=True)
class ThrottleSettings:
    """The limits that apply while the KV cache is overloaded, and only at the start of an interaction.

    A user's limit is learned from all users, and one user's limit in an app from the users of that app. Both use the
    median, because a few members may make up most of a population. An app's limit is learned from its own past.
    """

    window_s: float = 60.0
    patience_s: float = 30.0
    """A learned limit refuses nobody whose tenant waits for less than this."""
    user: Ceilings = USER
    app_user: Ceilings = USER
    app: Ceilings = APP

    def __post_init__(self) -> None:
        if not self.window_s > 0:
            raise ValueError(f"throttle: window_s is {self.window_s}; it must be greater than 0")
        if not self.patience_s >= 0:
            raise ValueError(f"throttle: patience_s is {self.patience_s}; it cannot be negative")
        for name in ("starts", "requests", "tokens"):
            user, app = getattr(self.user, name), getattr(self.app, name)
            if isinstance(user, int) and isinstance(app, int) and user > app:
                raise ValueError(f"throttle: a user's limit of {user} {name} is more than its whole app's of {app}")
