"""What deploy/Dockerfile builds, made by its own commands in a root of Debian, without a container engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

from tests.deploy.debian import run

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
BUILD_S = 1500.0


def steps() -> list[tuple[str, str]]:
    """Return the name and the text of each instruction of the stage that builds."""
    stage = DOCKERFILE.partition("\nFROM ${BUILD_IMAGE} AS build\n")[2].partition("\nFROM ")[0]
    lines = [line for line in stage.replace("\\\n", "").splitlines() if line.strip() and not line.startswith("#")]
    return [(name, text) for name, _, text in (line.partition(" ") for line in lines)]


def context() -> list[str]:
    """Return what `.dockerignore` lets an image have: nothing but what has a `!` before it."""
    first, *rules = (ROOT / ".dockerignore").read_text().split()
    assert (first, rules.pop()) == ("*", "**/__pycache__")
    assert all(rule.startswith("!") for rule in rules)
    return [rule.removeprefix("!") for rule in rules]


async def built(root: Path) -> None:
    """Run the stage that builds in this root. RuntimeError: a command failed; its text says what the command said."""
    workdir, settings = "/", await run(["python3", "-m", "pip", "config", "list"])
    for name, text in steps():
        if name == "WORKDIR":
            workdir = text
            (root / workdir.lstrip("/")).mkdir()
        elif name == "COPY":
            _copy(text, root / workdir.lstrip("/"))
        else:
            assert name == "RUN", f"{name} {text} is not understood"
            await run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", _inside(root, settings)],
                      BUILD_S, COMMAND=f"cd {workdir}; {text}", HOME="/root")  # fmt: skip


def _copy(text: str, to: Path) -> None:
    *sources, target = text.split()
    for source in context() if sources == ["."] else sources:
        assert source in context(), f"COPY {text}: the context has no {source}"
        place = to / (source if sources == ["."] else Path(target, Path(source).name))
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, place)


def _inside(root: Path, pip_settings: str) -> str:
    """Return a script that runs $COMMAND in this root, with this machine's network and package indexes."""
    found = re.findall(r"\.([a-z-]+)='(.*)'", pip_settings)
    settings = {f"PIP_{name.replace('-', '_').upper()}": value for name, value in found}
    named = re.findall(r"(?<![\w:/])(?:file://)?(/\w[\w./-]*)", " ".join(settings.values()))
    # A simple index refers to files beside it, so its whole folder is there.
    folders = {"/".join(path.split("/")[:3]) for path in named if Path(path).exists()}
    script = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    for path in ("/etc/resolv.conf", "/etc/hosts", *sorted(folders)):
        make = "mkdir -p" if Path(path).is_dir() else "touch"
        script.append(f"{make} {root}{path}; mount --bind {path} {root}{path}")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (settings | _proxies()).items()]
    return "\n".join(
        [
            *script,
            *exports,
            "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f'exec chroot {root} sh -ec "$COMMAND"',
        ]
    )


def _proxies() -> dict[str, str]:
    names = ("http_proxy", "https_proxy", "no_proxy")
    return {name: value for name, value in os.environ.items() if name.lower() in names}
