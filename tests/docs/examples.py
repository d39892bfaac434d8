"""The examples of the documentation, and how they are run: word for word, with ports of the test's own.

A block of `sh` or `console` is run line by line with bash, `python` by Python, each page in a folder of its own, from
its first block to its last. A block whose first line is `# NAME` is written to the file NAME instead. What serves stays
until the page ends. A plain block after a command is what it says; numbers and names in it may differ.

README, tutorials and how-tos have what their own first lines install into a clone, and nothing else; pages that begin
alike share it. Other pages have what the tests have.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, NamedTuple

from tests.ports import free_port
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVES = re.compile(r"(fairgate (serve|sim)|make run|redis-server|llama-server)\b")
FRESH = ("README.md", "docs/tutorials", "docs/how-to")
PORTS = ("8080", "8081", "8082", "8190", "8191", "18190", "8000", "8001", "8002", "8003", "6379")
IS_UP = re.compile(rb"serving on|Ready to accept|listening")
LLAMA_SERVER = f"PYTHONPATH={ROOT} {sys.executable} -m tests.llama_server"
"""The same server, from a wheel."""
NEEDED = {
    "docker": "a container engine", "podman": "a container engine", "kubectl": "a cluster", "systemctl": "systemd",
    "journalctl": "systemd", "vllm": "vLLM and a GPU", "ssh": "another machine", "sudo": "root", "apt-get": "root",
    "pip": "a package index", "pipx": "a package index", "uv": "a package index", "git": "the repository's address",
}  # fmt: skip
"""Commands that the tests do not run, and what they would need."""
CONFIG = """listen: 127.0.0.1:8080
admin: 127.0.0.1:8190
access_log: access.log
pools: [{name: main, models: [llama-3.1-8b], backends: [{url: "http://127.0.0.1:8000"}]}]
tenants: [{name: alice}]
"""
"""The config.yaml of pages that speak of one and show none."""
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*) -->\n+)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S
)


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    """What stands in the comment before it: `not run: REASON`, or `only run: REASON` where what it says differs."""

    @property
    def why_not(self) -> str:
        """Why is it not run? Empty: it is."""
        if self.mark.startswith("not run: "):
            return self.mark.removeprefix("not run: ")
        needed = {NEEDED.get(line.removeprefix("$ ").split(" ")[0]) for line in self._lines()}
        return f"needs {', '.join(sorted(map(str, needed)))}" if needed and None not in needed else ""

    @property
    def is_compared(self) -> bool:
        """Must it say what the page shows?"""
        return not self.mark.startswith("only run: ")

    def _lines(self) -> list[str]:
        if self.language not in ("sh", "console"):
            return []
        text = re.sub(r"\\\n\s*", "", self.text)
        return [
            line
            for line in text.splitlines()
            if line.strip() and line[0] not in "# " and (self.language == "sh" or line.startswith("$ "))
        ]

    @property
    def file(self) -> str:
        """The file that it is, if it says so in its first line."""
        found = re.match(r"# ([\w./-]+\.(?:yaml|py))\n", self.text)
        return found[1] if found else ""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page.relative_to(ROOT).as_posix(),
            text[: found.start("language")].count("\n") + 1,
            found["language"],
            re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            found["mark"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def is_fresh(page: Path) -> bool:
    return page.relative_to(ROOT).as_posix().startswith(FRESH)


def bare() -> dict[str, str]:
    """The environment of a machine on which nothing of ours is installed."""
    path = [one for one in os.environ["PATH"].split(":") if Path(one) != Path(sys.executable).parent]
    kept = {name: value for name, value in os.environ.items() if not re.match("PYTHON|VIRTUAL_ENV|MAKE|MFLAGS", name)}
    return kept | {"PATH": ":".join([f"{sys.base_prefix}/bin", *path])}


def cloned(folder: Path) -> Path:
    """What git would clone, with what is not committed yet."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def shell(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str, dict[str, str]]:
    """What bash ends with and says, and the environment that it leaves."""
    after = folder / ".environment"
    done = subprocess.run(
        ["bash", "-c", f"trap 'env -0 >{after}' EXIT\n{command}"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WAIT_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), dict(one.split("=", 1) for one in after.read_text().split("\0")[:-1])


def installed(lines: str, folder: Path) -> tuple[int, str, dict[str, str]]:
    """Run the first lines of a page in a clone in which nothing was installed: once for all that share the folder."""
    done = folder / f"{sha256(lines.encode()).hexdigest()}.json"
    with done.with_suffix(".lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not done.exists():
            done.write_text(json.dumps(shell(lines, cloned(Path(mkdtemp(dir=folder))), bare())))
        status, said, left = json.loads(done.read_text())
        return status, said, left


class Page:
    """Runs the examples of one page in a folder of its own, and what it installs in a clone below `clones`."""

    def __init__(self, path: Path, folder: Path, clones: Path) -> None:
        self.path = path
        self.folder = folder
        self._clones = clones
        self._ports = {port: str(free_port()) for port in PORTS}
        self._serving: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._gateways: dict[str, subprocess.Popen[bytes]] = {}
        """By the port for clients: one that wants the port of another takes its place."""
        of_the_tests = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH") or str(ROOT),
        }
        self._environment = (bare() if is_fresh(path) else of_the_tests) | {
            "FAIRGATE_ADMIN_TOKEN": "a-token-of-this-page",
            "ADMIN_TOKEN": "a-token-of-this-page",
            "ADMIN_ADDRESS": f"127.0.0.1:{self._ports['8190']}",
            "KEY": "fg-a-key-that-somebody-made-elsewhere",
            "COLUMNS": "100",
        }
        if path.name == "README.md":
            cloned(folder)
        else:
            (folder / "docs").mkdir()
            (folder / "docs/examples").symlink_to(ROOT / "docs/examples")
        (folder / "config.yaml").write_text(self.with_ports(CONFIG))

    def with_ports(self, text: str) -> str:
        """The same with ports that are free; those of hosts elsewhere stay."""
        pattern = rf"(?<![\w.:])((?:http://|redis://)?(?:127\.0\.0\.1|localhost)?:?)\b({'|'.join(PORTS)})\b(?![\w.])"
        return re.sub(pattern, lambda found: found[1] + self._ports[found[2]], text)

    def run(self) -> list[str]:
        """Everything, in order. What went otherwise than the page says; empty: nothing did."""
        faults: list[str] = []
        said = ""
        for block in blocks(self.path):
            where = f"{block.page}:{block.line}"
            if block.why_not:
                said = ""
            elif block.file:
                (self.folder / block.file).write_text(self.with_ports(block.text), encoding="utf-8")
            elif block.language in ("sh", "console"):
                said = ""
                for command, shown in commands(block):
                    status, output = self._run(command)
                    said += output
                    if status:
                        faults.append(f"{where}: {command!r} ended with {status}: {output[-2000:]}")
                    elif block.is_compared and (lines := missing(shown, output)):
                        faults.append(f"{where}: {command!r} did not say {lines}, but {output[-2000:]}")
            elif block.language == "python":
                status, said = self._run(f"python - <<'END'\n{block.text}END")
                if status:
                    faults.append(f"{where}: {said[-2000:]}")
            elif block.language in ("", "text") and said and (lines := missing(block.text, said)):
                faults.append(f"{where}: was not said: {lines}, but {said[-2000:]}")
        return faults

    def _run(self, command: str) -> tuple[int, str]:
        command = self.with_ports(command)
        if command == "make run":
            command += f" PORT={self._ports['8080']} ADMIN_PORT={self._ports['8190']}"
        elif "fairgate serve" in command:
            command += self._addresses(command)
        elif command.startswith("llama-server "):
            return self._serve(command.replace("llama-server", LLAMA_SERVER, 1))
        admin = f" --admin http://127.0.0.1:{self._ports['8190']}"
        command = re.sub(
            r"^fairgate (top|explain|drain|resume|reload)\b(?!.* (-c|--admin) ).*",
            r"\g<0>" + admin,
            command,
            flags=re.M,
        )
        if SERVES.match(command) or "fairgate serve" in command:
            return self._serve(command)
        if " -m venv " in command:
            status, said, left = installed(command, self._clones)
            self._environment = left | self._environment | {"PATH": left["PATH"]}
        else:
            status, said, self._environment = shell(command, self.folder, self._environment)
        return status, said

    def _addresses(self, command: str) -> str:
        """Options for the listeners that neither the command nor its file places."""
        file = re.search(r"-c (\S+)", command)
        is_second = "--port " in command and f"--port {self._ports['8080']}" not in command
        admin = free_port() if is_second else self._ports["8190"]
        said = command + ((self.folder / file[1]).read_text() if file else "")
        return "".join(
            f" {option} {port}"
            for option, field, port in (
                ("--port", "\nlisten:", self._ports["8080"]),
                ("--admin-port", "\nadmin:", admin),
            )
            if f"{option} " not in said and field not in said
        )

    def _serve(self, command: str) -> tuple[int, str]:
        """Until the page ends; what it says until it serves."""
        port = found[1] if (found := re.search(r"--port (\d+)", command)) else self._ports["8080"]
        if port in self._gateways:
            self._gateways[port].terminate()
            self._gateways[port].wait(WAIT_S)
        output = (self.folder / f"served-{len(self._serving)}.txt").open("w+b")
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],
            cwd=self.folder,
            env=self._environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self._serving.append((process, output))
        self._gateways[port] = process
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s and process.poll() is None:
            said = Path(output.name).read_bytes()
            if IS_UP.search(said) or (" sim " in command and _listens(command)):
                return 0, said.decode()
            time.sleep(0.02)
        return process.returncode or 1, Path(output.name).read_text()

    def stop(self) -> None:
        for process, _ in reversed(self._serving):
            process.terminate()
        for process, output in self._serving:
            process.wait(WAIT_S)
            output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _listens(command: str) -> bool:
    """Does it take connections at the port that it was given?"""
    found = re.search(r"--port (\d+)", command)
    assert found is not None, "fairgate sim without --port"
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(found[1]))) == 0


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a block, and what it is shown to say. In `console`, commands stand after a `$`."""
    text = re.sub(r"\\\n\s*", "", block.text)
    if block.language == "console":
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            yield command, shown
        return
    kept: list[str] = []
    for line in text.splitlines():
        if SERVES.match(line):
            if kept:
                yield "set -e\n" + "\n".join(kept), ""
                kept = []
            yield re.sub(r"\s+#.*", "", line), ""
        else:
            kept.append(line)
    if any(line.strip() and not line.startswith("#") for line in kept):
        yield "set -e\n" + "\n".join(kept), ""


def missing(shown: str, said: str) -> list[str]:
    """Which lines of what a page shows were not said? Numbers, hashes and spaces may differ; `...` is anything."""
    lines = [_alike(line) for line in said.splitlines()]
    return [
        line
        for line in shown.splitlines()
        if line.strip() not in ("", "...") and not any(_says(_alike(line), other) for other in lines)
    ]


def _alike(line: str) -> str:
    line = re.sub(r"(req_|fg-|sha256:|key-)[\w-]+", r"\1_", line)
    line = re.sub(r"\b[0-9a-f]{12,}\b|-?\d[\d,]*(\.\d+)?|-(?= |$)", "#", line)
    return " ".join(re.sub(r"\b(ms|s)\b", "s", re.sub(r"[-─═]{3,}", "---", line)).split())


def _says(shown: str, said: str) -> bool:
    """A line that shows the beginning, or the end, of what is said."""
    return re.fullmatch(".*".join(map(re.escape, shown.split("..."))), said) is not None


def as_json(text: str) -> object:
    """A block of JSON, which may be some members of an object."""
    text = text.strip().rstrip(",")
    return json.loads(text if text[:1] in "{[" else f"{{{text}}}")
