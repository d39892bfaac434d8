"""The command `fairgate replay`: what would this traffic have seen under other policies, limits or engines?"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from gateway.commands.common import CommandError, config_option

if TYPE_CHECKING:
    from backends.simulated.engine_profiles import EngineProfile
    from gateway.config.model import Config, PoolConfig
    from gateway.config.sections.backends import BackendConfig
    from policies.admission.engine import AdmissionEngine
    from simulation.replay import ReplayResult
    from simulation.traces.reader import Trace

POLICIES = "fcfs,vtc,dlpm,fairserve"
BASELINE = "fcfs"
PROFILE = "h100-llama3.1-8b"
"""Engine profile for a trace that does not say how fast its engines were."""
UNMEASURED = f"The trace does not say how fast its engines were: {PROFILE} is taken. --profile names another."
BACKENDS_MAX = 1024
NAMES_MAX = 5


@click.command()
@click.argument(
    "paths", metavar="TRACE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
@config_option("A gateway's file: its policy, limits, weights and engines.", "config_path")
@click.option("--pool", "pool_name", help="Pool of the file, if it has several.")
@click.option(
    "--policy", "policies", help=f"Policies, with commas.  [default: {POLICIES}; with -c: {BASELINE} and the file's]"
)
@click.option(
    "--backends",
    type=click.IntRange(1, BACKENDS_MAX),
    multiple=True,
    help="Number of engines; repeat to compare several.  [default: as the log tells, or 1; with -c: the pool's]",
)
@click.option("--profile", "profile_name", help=f"Engine to imitate.  [default: as fast as the log's, or {PROFILE}]")
@click.option("--speed", default=1.0, show_default=True, help="Factor of the arrival rate.")
@click.option("--limit", type=click.IntRange(1), help="Number of first requests to replay.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers here.")
@click.option(
    "--picture",
    "picture_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw each tenant's service over time here (.svg, .png or .pdf).",
)
def replay(
    paths: tuple[str, ...], config_path: Path | None, pool_name: str | None, policies: str | None,
    backends: tuple[int, ...], profile_name: str | None, speed: float, limit: int | None,
    json_path: Path | None, picture_path: Path | None,
) -> None:  # fmt: skip
    """Replay recorded traffic under several policies in virtual time. TRACE is fairgate's access log, also while the
    log is written, or a public trace; several files are read as one; -: standard input.

    \b
    fairgate replay access.log
    fairgate replay access.log --picture replay.svg
    fairgate replay access.log* -c gateway.yaml                 under your own limits and weights
    fairgate replay access.log -c gateway.yaml --backends 3     what would another engine bring?
    fairgate replay conversation_trace.jsonl.gz --speed 2 --limit 1000

    The production policies run before simulated engines. docs/replay.md has the formats.
    """
    from backends.simulated.engine_profiles import UnknownProfileError, profile
    from gateway.config.load import ConfigError
    from simulation.measured import EngineEstimate, measured
    from simulation.replay import UnknownPolicyError, policy_names
    from simulation.report import PictureError, ReplayReport, as_json, as_text, draw
    from simulation.traces.lines import TraceError
    from simulation.traces.reader import Trace

    if not 0 < speed < float("inf"):
        raise click.BadParameter("must be a number above 0", param_hint="--speed")
    if pool_name is not None and config_path is None:
        raise click.UsageError("--pool NAME needs -c FILE, which has the pools")
    with ExitStack() as stack:
        try:
            setting = _PoolSetting.load(config_path, pool_name) if config_path is not None else None
            if policies is None:
                policies = setting.policies() if setting is not None else POLICIES
            names = policy_names(policies)
            engine = EngineEstimate(profile(profile_name or PROFILE), 1, UNMEASURED)
            weights, models = (setting.weights(), setting.models()) if setting is not None else ({}, ())
            files = [readable(path, stack) for path in paths]
            row = None
            with suppress(ModuleNotFoundError):  # A clone of the repository can read public traces as well.
                row = import_module("lab.public_traces").row_of(*files)
            trace = Trace(*files, row=row, speed=speed, limit=limit, weights=weights, models=models)
            for path in (json_path, picture_path):
                if path is not None:
                    path.touch()  # A file that cannot be written should fail before a long run.
            if profile_name is None:
                engine = measured(trace.entries()) or engine
            counts = (setting.counts(backends) if setting is not None else backends) or (engine.backends,)
            results = [
                _run(name, count, trace, engine.profile, setting) for count in dict.fromkeys(counts) for name in names
            ]
            remarks = [] if profile_name is not None else [engine.why]
            remarks += setting.remarks(trace) if setting is not None else []
            replayed = ReplayReport(trace, engine.profile, results, remarks)
            if json_path is not None:
                json_path.write_text(as_json(replayed), encoding="utf-8")
            if picture_path is not None:
                draw(replayed, picture_path)
        except ConfigError as error:
            raise CommandError(str(error)) from None
        except (TraceError, UnknownPolicyError, UnknownProfileError, OSError, PictureError) as error:
            raise CommandError(f"fairgate: {error}") from None
    click.echo(as_text(replayed), nl=False)


def readable(name: str, stack: ExitStack) -> Path:
    """Return the path of a file that can be read several times: a pipe is copied to a temporary file."""
    path = Path("/dev/stdin" if name == "-" else name)
    if path.is_file():
        return path
    kept = Path(stack.enter_context(TemporaryDirectory(prefix="fairgate-")), path.name)
    with path.open("rb") as pipe, kept.open("wb") as file:
        shutil.copyfileobj(pipe, file)
    return kept


def _run(policy: str, count: int, trace: Trace, profile: EngineProfile, setting: _PoolSetting | None) -> ReplayResult:
    """Replay the trace once, with a progress bar on a terminal."""
    from simulation.replay import replay_under

    profiles, engine = [profile] * count, None
    if setting is not None:
        profiles, engine = setting.profiles(profile, count), setting.engine(policy, count)
    hidden = not sys.stderr.isatty()
    with click.progressbar(length=trace.requests, label=policy, file=sys.stderr, hidden=hidden) as bar:
        return replay_under(policy, trace, *profiles, engine=engine, ended=lambda: bar.update(1))


@dataclass(frozen=True, slots=True)
class _PoolSetting:
    """Policies, limits, weights and engines of one pool of a gateway's configuration."""

    path: Path
    config: Config
    pool: PoolConfig

    @classmethod
    def load(cls, path: Path, pool_name: str | None) -> _PoolSetting:
        """Load one pool's setting. Raise ConfigError, or UsageError if it is not clear which pool is meant."""
        from gateway.config.load import load_config

        config = load_config(path, workers=1)
        pools = {pool.name: pool for pool in config.pools}
        if pool_name is None and len(pools) == 1:
            [pool_name] = pools
        if pool_name not in pools:
            asked = "say by --pool which one served this traffic" if pool_name is None else f"none is {pool_name!r}"
            raise click.UsageError(f"{path} has the pools {', '.join(pools)}: {asked}")
        return cls(path, config, pools[pool_name])

    def policies(self) -> str:
        """Return the policies to compare: the baseline and the pool's own."""
        own = self.config.policy.name
        return f"{BASELINE},{'fairserve' if own == BASELINE else own}"

    def counts(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of engines to compare: the pool's own, which a single other number is compared with."""
        return asked if len(asked) > 1 else (len(self.pool.backends), *asked)

    def weights(self) -> dict[str, float]:
        return {tenant.name: tenant.weight for tenant in self.config.tenants}

    def models(self) -> tuple[str, ...]:
        """Return the models whose requests are the pool's; empty if all are."""
        return self.pool.models if len(self.config.pools) > 1 else ()

    def profiles(self, profile: EngineProfile, count: int) -> list[EngineProfile]:
        """Return profiles like this one, each with its backend's limit of sequences that run at once."""
        return [
            profile if (most := backend.max_num_seqs) is None
            else replace(profile, max_num_seqs=min(most, profile.max_num_batched_tokens))
            for backend in self._backends(count)
        ]  # fmt: skip

    def engine(self, policy: str, count: int) -> AdmissionEngine:
        """Return a new admission engine as the gateway would make it, without backends."""
        from gateway.config.sections.policy_choice import PolicyConfig
        from gateway.pool.shared import CrossPoolState, admission_engine

        config = self.config
        if policy != config.policy.name:
            config = config.model_copy(update={"policy": PolicyConfig(name=policy)})
        pool = self.pool.model_copy(update={"backends": self._backends(count)})
        return admission_engine(config, pool, CrossPoolState.from_config(config))

    def _backends(self, count: int) -> tuple[BackendConfig, ...]:
        """Return this number of backends: the pool's, with the last one repeated."""
        backends = self.pool.backends
        return (*backends[:count], *[backends[-1]] * (count - len(backends)))

    def remarks(self, trace: Trace) -> list[str]:
        """Return remarks for the operator on the file and this traffic."""
        remarks = [f"Limits, weights and settings are those of {self.path.name}, pool {self.pool.name}."]
        known = {tenant.name for tenant in self.config.tenants}
        unknown = [tenant for tenant in trace.demand if tenant not in known]
        if known and unknown:
            more = f" and {len(unknown) - NAMES_MAX:,} more" if len(unknown) > NAMES_MAX else ""
            names = ", ".join(sorted(unknown)[:NAMES_MAX]) + more
            whose = f"Not among the tenants of {self.path.name}: {names}."
            remarks.append(f"{whose} They keep the weight that the trace gives.")
        return remarks
