"""Limits as requests meet them: the limit that refuses, and gateways that count limits together."""

from __future__ import annotations

from policies.limits.quotas import Quotas
from policies.replicas.messages import ReplicaReport
from policies.replicas.tallies import SharedQuotas
from policies.request import Rejection
from tests.kit.typed_script_store import TypedScriptStore


def limit_of(refused: Rejection | None) -> str:
    """Return the name of the limit that refuses a request; "" if none does."""
    if refused is None:
        return ""
    return refused.limit.name


class CountingGateway:
    """One of some gateways that count the same limits in one store."""

    def __init__(self, name: str, store: TypedScriptStore, quotas: Quotas) -> None:
        self.quotas = quotas
        self.shared = SharedQuotas(quotas, epoch_s=0.0)
        self._name, self._store, self._number = name, store, 0

    def tells(self, now: float, *, gateways: int = 2) -> None:
        """Exchange what was counted here for what the others have counted."""
        self._number += 1
        report = ReplicaReport([], [], [], self.shared.report(100), [], [], [], 0.0)
        view = self._store.exchange(self._name, self._number, report, int(1000 * now))
        self.shared.receive(view.counted, gateways, [])
