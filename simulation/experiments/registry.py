"""Which experiments are there? One entry each, in the order in which they are reported."""

from __future__ import annotations

from simulation.experiments import vtc_figures as figures
from simulation.experiments import vtc_tables as tables
from simulation.experiments.base import Experiment
from simulation.experiments.dlpm import DLPM_EXPERIMENTS
from simulation.experiments.fairserve import FAIRSERVE
from simulation.experiments.fairserve_regimes import FAIRSERVE_REGIMES
from simulation.experiments.fairserve_table4 import FAIRSERVE_TABLE4
from simulation.experiments.gateway_window import GATEWAY_WINDOW

__all__ = ["EXPERIMENTS"]

_ALL: tuple[Experiment, ...] = (
    tables.METRICS,
    tables.RPM,
    tables.TABLE2,
    tables.TABLE3,
    tables.TABLE4,
    tables.TABLE5,
    tables.TABLE6,
    figures.FIG3,
    figures.FIG4,
    figures.FIG5,
    figures.FIG6,
    figures.FIG7,
    figures.FIG8,
    figures.FIG9,
    figures.FIG10,
    figures.WEIGHTED,
    GATEWAY_WINDOW,
    *DLPM_EXPERIMENTS,
    FAIRSERVE,
    FAIRSERVE_TABLE4,
    FAIRSERVE_REGIMES,
)

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
