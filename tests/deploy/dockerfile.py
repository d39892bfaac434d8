"""Builds what a Dockerfile says without a container engine: its own commands, each in the file system it is meant for.

Only what the Dockerfile of this repository uses is understood; anything else is an error, never passed over.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from tests.deploy.container import Image, Mount, Sandbox, run

BUILD_S = 1500.0
Base = Callable[[str, Path], Awaitable[Image]]
"""Makes an image by its name in a folder that does not exist yet."""


class Instruction(NamedTuple):
    line: int
    name: str
    text: str


def instructions(text: str) -> Iterator[Instruction]:
    """One after the other, with continued lines joined as Docker does."""
    begun, said = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not said and not line.strip()):
            continue
        begun = begun if said else number
        said += line.removesuffix("\\")
        if not line.endswith("\\"):
            name, _, rest = said.strip().partition(" ")
            yield Instruction(begun, name.upper(), rest.strip())
            said = ""


def context_files(context: Path) -> list[str]:
    """What `.dockerignore` lets an image have: the last pattern that matches a path, or a folder above it, decides."""
    rules = [line.strip() for line in (context / ".dockerignore").read_text().splitlines()]
    rules = [rule for rule in rules if rule and not rule.startswith("#")]

    def is_in(path: Path) -> bool:
        names = [path.as_posix(), *(folder.as_posix() for folder in path.parents if folder.name)]
        found = True
        for rule in rules:
            pattern = rule.removeprefix("!").strip("/")
            parts = [pattern, pattern.removeprefix("**/")] if pattern.startswith("**/") else [pattern]
            is_hit = any(_matches(name, part, any_depth=len(parts) > 1) for name in names for part in parts)
            found = rule.startswith("!") if is_hit else found
        return found

    skipped = {".git", ".venv", "node_modules"}
    found = []
    for folder, folders, files in os.walk(context):
        folders[:] = [name for name in folders if name not in skipped]
        found += [(Path(folder) / name).relative_to(context) for name in files]
    return sorted(path.as_posix() for path in found if is_in(path))


def _matches(path: str, pattern: str, *, any_depth: bool) -> bool:
    steps, wanted = path.split("/"), pattern.split("/")
    if any_depth:
        steps = steps[-len(wanted) :]
    return len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted))


async def built(file: Path, context: Path, arguments: Mapping[str, str], base: Base, where: Path) -> Image:
    """The image of the last stage. RuntimeError: a command failed; its text says what the command said."""
    known: dict[str, str] = {}
    stages: dict[str, Image] = {}
    image: Image | None = None
    for each in instructions(file.read_text()):  # noqa: ASYNC240 (nobody else waits)
        if each.name == "ARG" and image is None:
            known[each.text] = arguments[each.text]
        elif each.name == "FROM":
            name, _, stage = each.text.partition(" AS ")
            stage = stage or f"stage-{len(stages)}"
            image = stages[stage] = await base(_substituted(name, known), where / stage)
        elif image is None:
            raise ValueError(f"{file}:{each.line}: {each.name} stands before FROM")
        else:
            try:
                await _STEPS[each.name](image, each.text, _Surroundings(context, stages))
            except KeyError as error:
                raise ValueError(f"{file}:{each.line}: {each.name} {each.text}: {error} is not understood") from error
    if image is None:
        raise ValueError(f"{file}: builds nothing")
    return image


class _Surroundings(NamedTuple):
    context: Path
    stages: Mapping[str, Image]


async def _run(image: Image, text: str, _: _Surroundings) -> None:
    settings, mounts = await _pip_settings()
    mounts = [*mounts, *(Mount(path, Path(path), read_only=True) for path in ("/etc/resolv.conf", "/etc/hosts"))]
    environment = {**image.environment, **settings, **_proxies(), "HOME": "/root"}
    sandbox = Sandbox(image.root, image.user, image.workdir, environment, mounts)
    await run(sandbox.argv(["/bin/sh", "-c", text]), BUILD_S)


async def _copy(image: Image, text: str, around: _Surroundings) -> None:
    words = text.split()
    sources = [word for word in words if not word.startswith("--")]
    *sources, target = sources
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    to = image.root / (Path(image.workdir) / target).as_posix().lstrip("/")
    if options.keys() == {"from"}:
        [source] = sources
        root = around.stages[options["from"]].root
        await run(["cp", "-a", str(root / source.lstrip("/")), str(to)], 120)
        return
    if options:
        raise KeyError(*options)
    files = context_files(around.context)
    for source in sources:
        named = [path for path in files if source == "." or path == source or path.startswith(f"{source}/")]
        if not named:
            raise FileNotFoundError(f"COPY {text}: the context has no {source}")
        for path in named:
            place = to / (path if source == "." else Path(path).name) if target.endswith(("/", ".")) else to
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(around.context / path, place)


async def _environment(image: Image, text: str, _: _Surroundings) -> None:
    pairs = [pair.partition("=") for pair in shlex.split(text)]
    image.environment |= {name: _substituted(value, image.environment) for name, _, value in pairs}


async def _workdir(image: Image, text: str, _: _Surroundings) -> None:
    image.workdir = text
    (image.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)


async def _user(image: Image, text: str, _: _Surroundings) -> None:
    image.user = text


async def _entrypoint(image: Image, text: str, _: _Surroundings) -> None:
    image.entrypoint, image.command = json.loads(text), []


async def _command(image: Image, text: str, _: _Surroundings) -> None:
    image.command = json.loads(text)


async def _health(image: Image, text: str, _: _Surroundings) -> None:
    image.health = json.loads(text.partition(" CMD ")[2])


async def _stop_signal(image: Image, text: str, _: _Surroundings) -> None:
    image.stop_signal = text


async def _says_only(image: Image, text: str, _: _Surroundings) -> None:
    """EXPOSE changes nothing."""


_STEPS: dict[str, Callable[[Image, str, _Surroundings], Awaitable[None]]] = {
    "RUN": _run, "COPY": _copy, "ENV": _environment, "WORKDIR": _workdir, "USER": _user, "ENTRYPOINT": _entrypoint,
    "CMD": _command, "HEALTHCHECK": _health, "STOPSIGNAL": _stop_signal, "EXPOSE": _says_only,
}  # fmt: skip


UNDERSTOOD = frozenset(("ARG", "FROM", *_STEPS))


def _substituted(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: known[found[1] or found[2]], text)


def _proxies() -> dict[str, str]:
    names = ("http_proxy", "https_proxy", "no_proxy")
    return {name: value for name, value in os.environ.items() if name.lower() in names}


async def _pip_settings() -> tuple[dict[str, str], list[Mount]]:
    """Where pip finds packages is this machine's own affair: its settings, and the local folders that they name."""
    settings: dict[str, str] = {}
    for line in (await run(["python3", "-m", "pip", "config", "list"])).splitlines():
        found = re.fullmatch(r"(?:global|install|:env:)\.([a-z-]+)='(.*)'", line)
        if found is not None:
            settings["PIP_" + found[1].replace("-", "_").upper()] = found[2]
    return settings, [Mount(path, Path(path), read_only=True) for path in _local(settings)]


def _local(settings: Mapping[str, str]) -> list[str]:
    """The files and folders that are named there."""
    paths = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    return sorted({str(_top(Path(path))) for path in paths if path.startswith("/") and Path(path).exists()})


def _top(path: Path) -> Path:
    """A simple index refers to files beside it."""
    return path.parent if path.name == "simple" else path
