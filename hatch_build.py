"""Compiles the modules that run for each request into the wheel, if HATCH_BUILD_HOOKS_ENABLE=1 asks for it.

It needs a C compiler, takes minutes, and saves half the instructions. Unasked, the source is installed as it is.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILERS = ("hatch-mypyc>=0.16", "types-pyyaml")
DIRECT_CALLS = "-fvisibility=hidden -fno-semantic-interposition -fno-plt"
"""Our functions call one another directly instead of through the tables of a shared library: a tenth less CPU."""


class Compiled(BuildHookInterface[Any]):
    """hatch-mypyc's hook. What it needs is asked for among what a build needs only where it runs."""

    def dependencies(self) -> list[str]:
        return [*COMPILERS, *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        if sys.platform == "linux":
            os.environ["CFLAGS"] = f"{DIRECT_CALLS} {os.environ.get('CFLAGS', '')}"
        self._mypyc().initialize(version, build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """No compiled module stays beside its source, where it would be found before a later version of it."""
        if not build_data["pure_python"]:
            self._mypyc().clean([version])

    def _mypyc(self) -> BuildHookInterface[Any]:
        from hatch_mypyc.plugin import MypycBuildHook

        return MypycBuildHook(
            self.root, self.config, self.build_config, self.metadata, self.directory, self.target_name, self.app
        )
