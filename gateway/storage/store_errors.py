"""Errors of stores outside the process: temporary ones, and those that an operator must fix."""

from __future__ import annotations

from gateway.telemetry.background import OperationalError


class StoreError(OperationalError):
    """An error of a store. The message says what happened, where, and what to do, and never holds a password."""


class StoreUnavailable(StoreError):
    """Redis or the database is temporarily unusable: unreachable, too slow, or loading. The gateway goes on without it.

    A command that was under way may or may not have taken effect.
    """


class StoreRefused(StoreError):
    """The store answers, but this gateway may not use it: wrong password, version or deployment."""
