"""Compiles the modules that run for each request into the wheel, where a C compiler and Python's headers are there.

So whoever installs from source gets the compiled gateway if the machine can make it. HATCH_BUILD_NO_HOOKS=true leaves
the source as it is; HATCH_BUILD_HOOKS_ENABLE=true fails where nothing can compile, instead of leaving it so.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILERS = ("hatch-mypyc>=0.16", "types-pyyaml")
DIRECT_CALLS = "-fvisibility=hidden -fno-semantic-interposition -fno-plt"
"""Our functions call one another directly instead of through the tables of a shared library: a tenth less CPU."""


class CompiledWhereItCanBe(BuildHookInterface[Any]):
    """hatch-mypyc's hook, if there is what it needs. It is asked for among what a build needs only then."""

    def dependencies(self) -> list[str]:
        return [*COMPILERS, *self.metadata.core.dependencies] if _compiles() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or not _compiles():
            return
        if sys.platform == "linux":
            os.environ["CFLAGS"] = f"{DIRECT_CALLS} {os.environ.get('CFLAGS', '')}"
        try:
            self._mypyc().initialize(version, build_data)
        except Exception as error:
            raise RuntimeError(
                f"{error}\nfairgate could not be compiled; HATCH_BUILD_NO_HOOKS=true installs it as it is written"
            ) from error

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """No compiled module stays beside its source, where it would be found before a later version of it."""
        if not build_data["pure_python"]:
            self._mypyc().clean([version])

    def _mypyc(self) -> BuildHookInterface[Any]:
        from hatch_mypyc.plugin import MypycBuildHook

        return MypycBuildHook(
            self.root, self.config, self.build_config, self.metadata, self.directory, self.target_name, self.app
        )


def _compiles() -> bool:
    if os.environ.get("HATCH_BUILD_HOOKS_ENABLE", "").lower() in ("1", "true"):
        return True
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "").split()
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return bool(compiler) and shutil.which(compiler[0]) is not None and headers.exists()
