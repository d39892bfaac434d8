"""Which tests need the source as it is written, and what tests of several folders are given."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

import gateway.http.server
import policies.admission.engine

# The same examples on every machine, and no limit to their time; `--hypothesis-profile default` looks for new ones.
settings.load_profile("ci")

COMPILED = not policies.admission.engine.__file__.endswith(".py")

# As in the gateway's own process: what lives long is not looked through again and again, a tenth of all CPU here.
gc.set_threshold(700, 5, 100_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not COMPILED:
        return
    for item in items:
        marker = item.get_closest_marker("interpreted_only")
        if marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"not on the compiled gateway: {marker.args[0]}"))


@pytest.fixture
def quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look for what is overdue so often that nobody waits for it."""
    monkeypatch.setattr(gateway.http.server, "_SWEEP_S", 0.01)
