"""Where are the papers' experiments? In `lab/`, beside the packages of a clone; no wheel holds them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

__all__ = ["NoExperimentsError", "RunExperiments", "experiments"]

RunExperiments = Callable[[tuple[str, ...], Path | None, Path | None, str, int | None], int]
"""Names, file for the numbers, directory of the page, directory of the traces, processes; what to exit with."""


class NoExperimentsError(Exception):
    """This installation has none; the message says where they are."""

    def __init__(self) -> None:
        super().__init__("the experiments are no part of an installation: clone the repository and run it there")


def experiments() -> RunExperiments:
    """What runs them. Raises NoExperimentsError."""
    try:
        run: RunExperiments = import_module("lab.command").run
    except ModuleNotFoundError as error:
        if error.name not in ("lab", "lab.command"):
            raise
        raise NoExperimentsError from error
    return run
