"""What can go wrong with what is kept outside of the process? Either it passes, or somebody has to do something."""

from __future__ import annotations

from gateway.telemetry.background import OperationalError


class StoreError(OperationalError):
    """The message says what happened, where, and what to do; never a password."""


class StoreUnavailable(StoreError):
    """Redis, or the database, cannot be asked now: not reached, too slow, or in a state that passes. The gateway goes
    on without it.

    Whether a command that was under way took effect is not known.
    """


class StoreRefused(StoreError):
    """It answers, and this gateway may not use it: another password, another version, another deployment."""
