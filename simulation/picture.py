"""The picture of a replay: how each policy divided the service over time. matplotlib draws it, an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulation.report import ReplayReport


class PictureError(Exception):
    """A picture that cannot be drawn."""


def draw(replayed: ReplayReport, file: Path) -> None:
    """Draw the service per second by tenant, a panel for each policy, and the gap between tenants.

    The ending of `file` names the format: png, svg or pdf. Raise PictureError for others, and without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PictureError("a picture needs matplotlib: pip install 'fairgate[plots]'") from None
    results = replayed.results
    figure = Figure(figsize=(9, 2.5 * (len(results) + 1)), layout="constrained")
    panels = figure.subplots(len(results) + 1, sharex=True, squeeze=False)[:, 0]
    for axes, result in zip(panels, results, strict=False):
        for tenant, course in result.service.items():
            axes.plot(*_columns(course), label=tenant)
        axes.set(title=replayed.label(result), ylabel="service per second")
        axes.sharey(panels[0])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    for result in results:
        panels[-1].plot(*_columns(result.gap), label=replayed.label(result))
    panels[-1].set(title="Gap between tenants", xlabel="seconds", ylabel="service per weight")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(replayed.trace.name)
    try:
        figure.savefig(file)
    except ValueError as error:
        raise PictureError(f"{file} cannot be written: {error}") from error


def _columns(course: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [at_s for at_s, _ in course], [value for _, value in course]
