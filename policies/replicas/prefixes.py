"""What do gateways report to each other of the prompts that they sent? No I/O.

`gateway.pool.replication.prefix_broadcast` carries the reports. Each gateway keeps its own index of the prompts that
engines have cached, and its own deficits of tenants at engines. Both follow from the prompts sent. So each gateway
reports the prompts that it sent, and applies others' reports as if it had sent their prompts itself. The store sends
each report once, and does not keep it, so a report may get lost. Both tables are estimates: a gateway that missed a
report takes the prompts in it for new ones.

A prompt is reported as its whole chain of blocks. The end alone would be shorter. But a gateway that had missed the
beginning, or has forgotten it, would then know blocks without the blocks before them, and the bisection of
`PrefixIndex` needs chains without gaps. With whole chains every report is complete by itself, whatever report was lost
before. A whole chain also says that the beginning is still in use. It costs 9 bytes for each 512 of a prompt, or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Final

from policies.admission.policy import Policy
from policies.placements.placement import Assignment
from policies.placements.prefix_index import Prefix
from policies.replicas.messages import REPORTED_MAX, PrefixReport, is_countable

VERSION: Final = 3
"""Version of the message, and of the cut of prompts into blocks and hashes: other hashes would only fill the index."""
BLOCKS_MAX: Final = 4096
"""Blocks in one message: 2 MB of prompts, so 84 MB a second with a message every 25 ms."""


class SharedPrefixes:
    """A gateway's side of the prefix reports: its own prompts to report, and the reports of others to apply."""

    def __init__(self, policy: Policy, engines: Container[str], *, name: str) -> None:
        """Follow the prompts that `policy` sends. `engines`: names in the pool. `name`: unique name of this gateway."""
        self._policy = policy
        self._engines = engines
        self._name = name
        self._sent: deque[tuple[str, Prefix]] = deque()
        self._blocks = 0
        self._charged: dict[tuple[str, str], float] = {}
        policy.on_sent = self._note_sent
        if isinstance(policy.placement, Assignment):
            policy.placement.on_charged = self._note_charged

    @property
    def has_report(self) -> bool:
        """Return whether there is anything to report."""
        return bool(self._sent or self._charged)

    def report(self) -> PrefixReport:
        """Return the prompts and charges since the last report; if there are too many, the latest."""
        report = PrefixReport(VERSION, self._name, {}, {})
        for engine, prefix in self._sent:
            report.sent.setdefault(engine, []).append(prefix)
        for (engine, tenant), service in self._charged.items():
            report.charged.setdefault(engine, {})[tenant] = service
        self._sent.clear()
        self._blocks = 0
        self._charged.clear()
        return report

    def receive(self, report: PrefixReport) -> bool:
        """Apply a gateway's report. Return False if it is invalid or of another version, and nothing was applied."""
        if report.version != VERSION or not _is_within_bounds(report):
            return False
        if report.replica == self._name:
            return True
        policy, placement = self._policy, self._policy.placement
        for engine, prefixes in report.sent.items():
            if engine in self._engines:
                for prefix in prefixes:
                    policy.sent_elsewhere(prefix, engine)
        if isinstance(placement, Assignment):
            for engine, charged in report.charged.items():
                if engine in self._engines:
                    for tenant, service in charged.items():
                        placement.charged_elsewhere(tenant, engine, service)
        return True

    def _note_sent(self, prefix: Prefix, engine: str) -> None:
        self._sent.append((engine, prefix))
        self._blocks += len(prefix)
        while self._blocks > BLOCKS_MAX:
            self._blocks -= len(self._sent.popleft()[1])

    def _note_charged(self, tenant: str, engine: str, service: float) -> None:
        key = (engine, tenant)
        self._charged[key] = self._charged.get(key, 0.0) + service
        if len(self._charged) > REPORTED_MAX:
            del self._charged[next(iter(self._charged))]


def _is_within_bounds(report: PrefixReport) -> bool:
    """Return whether a gateway of this version could have published this report."""
    blocks = sum([len(prefix) for prefixes in report.sent.values() for prefix in prefixes])
    services = [service for charged in report.charged.values() for service in charged.values()]
    # Numbers that are not countable would stay in the deficits for ever.
    return blocks <= BLOCKS_MAX and len(services) <= REPORTED_MAX and is_countable(services)
