"""Why can an engine not start a request now?"""

from __future__ import annotations

from typing import Literal

__all__ = ["Obstacle"]

Obstacle = Literal["closed", "waiting", "slots", "prefill", "kv", "spread", "turn"]
"""Why a backend cannot start a request now: not in service; its own queue is above target; no sequence slot;
prefill of others first; no KV; starts are spread to keep the KV evenly full; who waits at another gateway is next."""
