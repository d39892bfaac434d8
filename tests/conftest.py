"""Which tests need the source as it is written?"""

from __future__ import annotations

import pytest

import policies.admission.engine

COMPILED = not policies.admission.engine.__file__.endswith(".py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not COMPILED:
        return
    for item in items:
        marker = item.get_closest_marker("interpreted_only")
        if marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"not on the compiled gateway: {marker.args[0]}"))
