"""The terms on which groups and tenants share a pool: weights, floors, ceilings, and the place of each in the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from policies.settings import SettingError, check_bounds, setting

ROOT: Final = ""
"""Name of the root: the pool itself."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The entitlement of a group or tenant among its siblings. Shares are fractions of the whole pool."""

    weight: float = setting(1.0, "Share relative to siblings that have requests.", above=0, most=1000)
    guaranteed_share: float | None = setting(
        None, "Floor: part of the pool whenever it has requests, however many others there are.",
        kind=float, above=0, most=1,
    )  # fmt: skip
    max_share: float | None = setting(
        None, "Ceiling: part of the pool's slots and KV cache for its running requests, also while the rest is idle.",
        kind=float, above=0, most=1,
    )  # fmt: skip
    max_running: int | None = setting(None, "Ceiling: running sequences in a pool.", kind=int, least=1, most=1_000_000)
    lending_limit: float | None = setting(
        None, "Part of guaranteed_share that others may use while it is idle. Default: all.",
        kind=float, least=0, most=1,
    )  # fmt: skip
    borrowing_limit: float | None = setting(
        None, "Most that it may have beyond guaranteed_share. Default: whatever is free.", kind=float, least=0, most=1
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("lending_limit", "borrowing_limit"):
            if getattr(self, name) is not None and self.guaranteed_share is None:
                raise SettingError(name, f"{name} needs a guaranteed_share: it says what becomes of that")
        if (self.lending_limit or 0.0) > (self.guaranteed_share or 0.0):
            raise SettingError("lending_limit", "more is lent than guaranteed_share has")
        if (self.guaranteed_share or 0.0) > (self.max_share or 1.0):
            raise SettingError("max_share", "is less than guaranteed_share: the floor is above the ceiling")

    @property
    def ceiling_share(self) -> float:
        """Return the largest share that it may use, by `max_share` and by `borrowing_limit`; inf if there is none."""
        borrowed = inf if self.borrowing_limit is None else (self.guaranteed_share or 0.0) + self.borrowing_limit
        return min(inf if self.max_share is None else self.max_share, borrowed)

    @property
    def kept_share(self) -> float:
        """Return the share that is kept free for it: the floor less `lending_limit`. 0.0 if no lending limit is set."""
        return 0.0 if self.lending_limit is None else (self.guaranteed_share or 0.0) - self.lending_limit


@dataclass(frozen=True, slots=True)
class TreePlace:
    """The place of a group or tenant: the group that contains it (`ROOT` if none does), and its terms."""

    group: str
    settings: GroupSettings


@dataclass(frozen=True, slots=True)
class Tree:
    """The configured tree: groups, each after the group that contains it, and tenants with a group or with terms."""

    groups: Mapping[str, TreePlace] = field(default_factory=dict)
    tenants: Mapping[str, TreePlace] = field(default_factory=dict)

    def floors(self) -> dict[str, float]:
        """Return the floor of each group: its own, or the sum of the floors inside it if that is more."""
        inside = dict.fromkeys(self.groups, 0.0) | {ROOT: 0.0}
        for place in self.tenants.values():
            inside[place.group] += place.settings.guaranteed_share or 0.0
        for name, place in reversed([*self.groups.items()]):
            inside[name] = max(inside[name], place.settings.guaranteed_share or 0.0)
            inside[place.group] += inside[name]
        return inside
