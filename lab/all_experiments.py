"""Which experiments are there? One entry each, in the order in which they are reported."""

from __future__ import annotations

from lab.dlpm.experiments import DLPM_EXPERIMENTS
from lab.experiment import Experiment
from lab.fairserve.regimes import FAIRSERVE_REGIMES
from lab.fairserve.sections import FAIRSERVE
from lab.fairserve.table4 import FAIRSERVE_TABLE4
from lab.vtc import figures, paper_tables
from lab.vtc.gateway_window import GATEWAY_WINDOW

_ALL: tuple[Experiment, ...] = (
    paper_tables.METRICS,
    paper_tables.RPM,
    paper_tables.TABLE2,
    paper_tables.TABLE3,
    paper_tables.TABLE4,
    paper_tables.TABLE5,
    paper_tables.TABLE6,
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
