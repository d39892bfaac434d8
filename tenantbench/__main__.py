"""`tenantbench run`, `engine`, `install`, `gateways` and `report`."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from aiohttp import web

from tenantbench.engine_server import EngineServer
from tenantbench.gateway import KEYS, GatewayError, described, install, read
from tenantbench.report import text_of
from tenantbench.run import ENGINES, Options, run, say
from tenantbench.workloads import MAKERS


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tenantbench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run workloads through gateways in turn")
    runs.add_argument("--gateways", type=listed, default=list(described()), help="with commas; default: all")
    runs.add_argument("--workloads", type=listed, default=list(MAKERS))
    runs.add_argument("--engine", choices=ENGINES, default="simulated")
    runs.add_argument("--seconds", type=float, default=60.0, help="mean length of a workload")
    runs.add_argument("--rounds", type=int, default=1)
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--out", type=Path, default=Path("tenantbench-results"))
    runs.add_argument("--subject", default="", help="gateways whose name begins so have their losing rows first")
    runs.add_argument("--even-if-loaded", action="store_true", help="measure, and mark every number void")
    runs.add_argument("--url", action="append", default=[], help="of a gateway that runs; a second one for W9")
    runs.add_argument("--engine-url", default="", help="of `tenantbench engine`, behind that gateway")
    runs.add_argument(
        "--keys", type=listed, default=list(KEYS.values()), help=f"of the tenants {', '.join(KEYS)}, with commas"
    )
    engine = commands.add_parser("engine", help="serve an engine that logs who was served")
    engine.add_argument("--port", type=int, required=True)
    engine.add_argument("--kind", choices=ENGINES, default="simulated")
    report = commands.add_parser("report", help="print results side by side")
    report.add_argument("results", nargs="+", type=Path)
    report.add_argument("--subject", default="")
    report.add_argument("--plot", type=Path)
    commands.add_parser("gateways", help="list the gateways that are described")
    installs = commands.add_parser("install", help="install gateways from PyPI, or name their Debian packages")
    installs.add_argument("names", nargs="+")
    return parser


def listed(text: str) -> list[str]:
    return text.split(",")


def run_options(given: argparse.Namespace) -> Options:
    """Raises GatewayError."""
    options = Options(**{name: value for name, value in vars(given).items() if name != "command"})
    if unknown := set(options.workloads) - set(MAKERS):
        raise GatewayError(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}")
    if options.url and not options.engine_url:
        raise GatewayError("--url needs --engine-url: the truth comes from the engine's log")
    if options.url and options.gateways == list(described()):
        options.gateways = ["gateway"]
    if len(given.keys) != len(KEYS):
        raise GatewayError(f"--keys needs {len(KEYS)} keys, of {', '.join(KEYS)}; there are {len(given.keys)}")
    options.keys = dict(zip(KEYS, given.keys, strict=True))
    return options


def serve_engine(kind: str, port: int) -> None:
    profile = ENGINES[kind].profile
    if kind == "llama":
        from tenantbench.llama import Tap

        app = Tap(profile).app()
    else:
        app = EngineServer(profile).app()
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, handler_cancellation=True, print=lambda text: None)


def main() -> None:
    given = arguments().parse_args()
    try:
        if given.command == "engine":
            serve_engine(given.kind, given.port)
        elif given.command == "gateways":
            print("\n".join(described()))
        elif given.command == "install":
            for name in given.names:
                install(read(name))
        elif given.command == "report":
            results = [
                json.loads((path / "result.json" if path.is_dir() else path).read_text()) for path in given.results
            ]
            print(text_of(results, given.subject))
            if given.plot:
                from tenantbench.plots import draw

                draw(results, given.plot)
        else:
            text = text_of([asyncio.run(run(run_options(given)))], given.subject)
            (given.out / "table.md").write_text(text)
            print(text)
    except (asyncio.CancelledError, KeyboardInterrupt):
        say("tenantbench: ended before its time; result.json has what was measured")
        raise SystemExit(130) from None
    except GatewayError as error:
        say(f"tenantbench: {error}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
