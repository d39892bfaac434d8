"""Writes docs/reference/*.md from the code that they describe: `python -m docs.generate.reference`.

Tests compare the pages with what this writes, so whoever adds a field, an option, a metric or a reason runs it again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml

from docs.generate import memory
from docs.generate.config_fields import ConfigField, fields
from gateway.commands.admin import asks_admin
from gateway.commands.main import main as fairgate
from gateway.http.errors import ApiError, Reason
from gateway.telemetry.metric_families import FAMILIES, family

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REFERENCE = HERE.parent / "reference"
HOW_TO_WRITE = "<!-- Written by `python -m docs.generate.reference` from the code; do not edit. -->"
RUNBOOK: dict[str, dict[str, dict[str, str]]] = yaml.safe_load((HERE / "runbook.yaml").read_text(encoding="utf-8"))
HEADERS: dict[str, dict[str, str]] = yaml.safe_load((HERE / "headers.yaml").read_text(encoding="utf-8"))
OURS = ("gateway", "backends", "policies")


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    written = {
        "config.md": _config(),
        "memory.md": memory.lines(table),
        "cli.md": _cli(),
        "metrics.md": _metrics(),
        "log-fields.md": _log_fields(),
        "headers.md": _headers(),
        "reasons.md": _reasons(),
    }
    return {name: "\n".join(_with_notice(lines)) + "\n" for name, lines in written.items()}


def _with_notice(lines: Iterator[str]) -> Iterator[str]:
    yield next(lines)
    yield from ("", HOW_TO_WRITE)
    yield from lines


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table in Markdown; what would end a cell is written otherwise."""
    yield ""
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"


SHARED_MIN = 4
"""Fields that two sections have in common from which on they are described once."""


def _item(name: str, text: str, in_brackets: str = "") -> str:
    """Return an entry of a list in Markdown."""
    return f"- {name}{f' ({in_brackets})' if in_brackets else ''}: {' '.join(text.split())}"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def _config() -> Iterator[str]:
    yield "# Every field of the configuration"
    yield from (
        "",
        "`fairgate check FILE` names every fault with its line. Start from",
        "[config.example.yaml](../../config.example.yaml).",
        "",
        "In brackets: default, unit, bounds. A field without a default is off, or does what its text says. Times are",
        "in seconds and sizes in bytes. A number without a lower bound must be above 0. `[]` stands for each member",
        "of a list, `*` for each name.",
    )
    sections: dict[str, list[Entry]] = {}
    known = {one.section for one in fields()}
    for one in sorted(fields(), key=lambda one: one.section):
        section = code(one.section) or "The file itself"
        sections.setdefault(section, []).append(
            Entry(code(one.path.rpartition(".")[2]), _described(one), _example(one, known))
        )
    alike: dict[str, list[str]] = {}
    """Sections with the same fields stand together."""
    for section, entries in sections.items():
        alike.setdefault(str([entry[:2] for entry in entries]), []).append(section)
    for together in alike.values():
        entries = sections[together[-1]]
        yield from ("", f"## {', '.join(together)}", "")
        if common := _in_another(together, entries, sections):
            where, shared = common
            names = {entry.name for entry in shared}
            own = [entry.name for entry in sections[where] if entry.name not in names]
            said = f", without {', '.join(own)}" if 0 < len(own) < len(names) else ""
            yield f"As in {where}{said if said or not own else ': ' + ', '.join(entry.name for entry in shared)}."
            entries = [entry for entry in entries if entry.name not in names]
            if entries:
                yield ""
        yield from (f"- {entry.name}{entry.meaning}{entry.example}" for entry in entries)


class Entry(NamedTuple):
    """One field of a section, in Markdown."""

    name: str
    meaning: str
    example: str


def _in_another(
    together: list[str], entries: list[Entry], sections: dict[str, list[Entry]]
) -> tuple[str, list[Entry]] | None:
    """Return another section that has SHARED_MIN of these fields with equal meaning, and those fields."""
    for where, others in sections.items():
        has_all = len(entries) < len(others) and _says_all(others, entries)
        if where in together or (together[0] < where and not has_all) or (not has_all and _says_all(entries, others)):
            continue
        shared = [entry for entry in entries if _says_all(others, [entry])]
        if len(shared) >= SHARED_MIN or (shared and has_all):
            return where, shared
    return None


def _described(field: ConfigField) -> str:
    """Return default, unit and bounds in brackets, and the meaning."""
    default = field.default if field.default == "required" else code(field.default)
    if field.default in ("true", "false"):
        said = [default]
    else:
        unit = "" if _tells(field.path.rpartition(".")[2], field.unit) else field.unit
        bounds = "" if field.bounds in ("from 1", "above 0") else field.bounds.removesuffix(f" or {field.default}")
        if field.bounds and all(one in field.meaning for one in field.bounds.split(", ")):
            bounds = ""  # The text names each choice.
        said = ["" if field.default in ("null", "[]", "{}", "''") else default, unit, bounds]
        if field.default[:1].isdecimal():
            said[:2] = [f"{default} {unit}".rstrip()]
    in_brackets = "; ".join(filter(None, said))
    return f"{f' ({in_brackets})' if in_brackets else ''}: {_in_markdown(field.meaning)}"


def _tells(name: str, unit: str) -> bool:
    """Does the name of the field say the unit, or is there none to say?"""
    return unit in ("", "factor", "part of 1") or unit.startswith("seconds") or unit.split("/")[0] in name


def _example(field: ConfigField, sections: set[str]) -> str:
    """Return an example that shows more than a word, a path, the default or a part of the text."""
    example = field.example.partition(": ")[2]
    is_plain = example == field.default or re.fullmatch(r"[\w ./-]+|sha256:\w+", example)
    if f"{field.path}[]" in sections:
        return ""  # Its fields have examples.
    is_said = example in field.meaning or example.strip("[]'") in f"{field.meaning} {field.bounds}"
    return "" if is_plain or is_said else f" E.g. {code(example)}."


def _says_all(more: list[Entry], entries: list[Entry]) -> bool:
    """Are these fields among those, with the same meaning?"""
    return all(entry[:2] in [other[:2] for other in more] for entry in entries)


def _in_markdown(text: str) -> str:
    """A description, in which a star or an angle bracket means itself."""
    return " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;").replace("${", "\\${")


def _cli() -> Iterator[str]:
    yield "# The command line"
    yield from (
        "",
        "`fairgate COMMAND --help` says this. `-c` or `--config` names the gateway's file. Exit status:",
        "",
        "- 0: done.",
        "- 1: not done: a port is taken, a gateway refused, a required result was missed.",
        "- 2: wrong input: an option, a file, a Redis or a database that cannot be used.",
        "- 130: ended by Ctrl-C before it served.",
    )
    context = click.Context(asks_admin(click.command()(lambda: None)))
    asks = [_option(one, context) for one in context.command.params if isinstance(one, click.Option)]
    asking = [
        name for name, one in sorted(fairgate.commands.items()) if any("--admin" in each.opts for each in one.params)
    ]
    yield from ("", f"Commands that ask a running gateway ({', '.join(map(code, asking))}) find it by:", "", *asks)
    yield from _commands(fairgate, "fairgate", asks)


PLAIN = ("TEXT", "INTEGER", "FLOAT", "INTEGER RANGE", "FLOAT RANGE")
"""What click says of a value, where the text tells more."""
FILE = "The gateway's file."
"""The help of an option that the page describes once."""


def _commands(command: click.Command, name: str, common: list[str]) -> Iterator[str]:
    """`common`: options that are described already."""
    context = click.Context(command, info_name=name)
    if isinstance(command, click.Group):
        if name != "fairgate":
            yield from ("", f"## `{name}`", "", *_help(command))
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            assert found is not None
            yield from _commands(found, f"{name} {sub}", common)
        return
    usage = " ".join(command.collect_usage_pieces(context)).removeprefix("[OPTIONS]").strip()
    yield from ("", f"## `{f'{name} {usage}'.strip()}`", "", *_help(command))
    options = [
        one
        for one in command.get_params(context)
        if isinstance(one, click.Option) and "--help" not in one.opts and one.help != FILE
    ]
    rows = [_option(one, context) for one in options]
    if all(row in rows for row in common):
        rows = [row for row in rows if row not in common]
    if rows:
        yield from ("", *rows)


def _help(command: click.Command) -> Iterator[str]:
    """The help of a command; lines that click must not wrap are shown as they are."""
    for place, paragraph in enumerate((command.help or "").split("\n\n")):
        if place:
            yield ""
        kept = paragraph.strip("\n")
        if kept.lstrip().startswith("\b"):
            yield from ("```text", *(line.strip() for line in kept.lstrip().removeprefix("\b").strip().split("\n")))
            yield "```"
        else:
            yield " ".join(kept.split()).replace("*", "\\*")


def _option(option: click.Option, context: click.Context) -> str:
    described = option.to_info_dict()
    names = ", ".join(code(name) for name in [*option.opts, *option.secondary_opts])
    metavar = option.make_metavar(context)
    metavar = "" if option.is_flag or metavar in PLAIN else f" {code(metavar)}"
    text, _, written = (option.help or "").partition("[default: ")
    default = written.rstrip("]") if written else _default(described["default"], option)
    if default:
        default = f" ({default})" if option.required else f" (default: {default})"
    return f"- {names}{metavar}{default}: {_in_markdown(text.strip())}"


def _default(value: Any, option: click.Option) -> str:
    if value is None or value is False or "Sentinel" in type(value).__name__ or option.required:
        return "required" if option.required else ""
    if isinstance(value, list | tuple):
        return code(", ".join(str(one) for one in value))
    return code(str(value))


def _metrics() -> Iterator[str]:
    yield "# Metrics"
    yield from (
        "",
        "`GET /metrics` of the admin listener has these in Prometheus' format, with Prometheus' own `process_...`.",
        "Labels are in brackets. `..._total` are counters; the others are gauges unless they are named histograms.",
        "1,000 tenants, 100 of them in histograms, and 100 models have labels; the rest are `other`. Times are in",
        "seconds.",
        "",
    )
    for name, one in FAMILIES.items():
        kind = "histogram" if family(name, ()).type == "histogram" else ""
        yield _item(code(name), one.text, ", ".join(filter(None, (kind, *map(code, one.labels)))))
    yield from (
        "",
        "[Reasons](reasons.md) has the values of `outcome`, `reason` and `obstacle`. `kind` is `input`, `output` or",
        "`cached`, and for prompts at a backend also `expected` and `wrong`.",
    )


def log_fields() -> list[tuple[str, str, str]]:
    """Name, type and meaning of each field of the access log."""
    tree = ast.parse((ROOT / "gateway/telemetry/log_line.py").read_text(encoding="utf-8"))
    [line] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LogLine"]
    found = []
    for node, after in zip(line.body, [*line.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            meaning = str(after.value.value) if said else ""  # type: ignore[union-attr]
            found.append((ast.unparse(node.target), ast.unparse(node.annotation), meaning))
    return found


_TYPES = {"str": "", "int": "number", "float": "number", "bool": "true, false"}
_TYPES |= {"float | None": "number or null", "dict[str, float]": "numbers by name"}


def _log_fields() -> Iterator[str]:
    yield "# The access log"
    yield from (
        "",
        "Every request leaves one line of JSON when it ends, without prompt, answer or key. `..._ms` are milliseconds.",
        "Fields are text where no type is named. `fairgate replay` reads these lines.",
        "",
    )
    for name, kind, text in log_fields():
        yield _item(code(name), text, _TYPES[kind])
    yield from (
        "",
        "[Reasons](reasons.md) has the values of `outcome`, `reason`, `waited_ms` and `placed`.",
    )


def _headers() -> Iterator[str]:
    from gateway.http import headers

    yield "# Header fields"
    for intro, way in (
        ("Clients may send these, and need only their key:", "from clients"),
        ("Answers have these, beside the engine's own:", "to clients"),
    ):
        yield from ("", intro, "")
        by_text: dict[str, list[str]] = {}
        for name, text in HEADERS[way].items():
            by_text.setdefault(text, []).append(code(name))
        yield from (_item(", ".join(names), text) for text, names in by_text.items())
    dropped, hidden = (
        sorted(name.decode() for name in names) for names in (headers.REQUEST_DROPPED, headers.RESPONSE_DROPPED)
    )
    yield from (
        "",
        "## What does not pass",
        "",
        "These fields of a client do not reach the engine (`host`, `content-length`, `x-request-id`: the gateway's):",
        "",
        ", ".join(code(name) for name in dropped)
        + ", and all that begin with `proxy-`, `x-fairgate-` or `x-forwarded-`, or that `connection` names. All others "
        "pass. No setting changes this.",
        "",
        "These fields of an engine do not reach clients:",
        "",
        ", ".join(code(name) for name in hidden) + ".",
    )


NOT_BAD = ("For that client only.", "No.")
NOTHING = ("Nothing.", "Correct the client.")
FAULT = ("Yes. It is a fault of the gateway.", "Report the lines that follow it.")


def _reasons() -> Iterator[str]:
    yield "# Reasons and errors, and what to do"
    yield from (
        "",
        "These words stand in answers, the access log, metrics and `fairgate explain`. An entry without",
        "**Bad?** is bad for that client at most; without **Do:** only the client can mend it, or nobody need.",
        "",
        "## Reasons",
        "",
        "OpenAI's clients find the reason as `code` of the error, Anthropic's before its message. The number is the",
        "HTTP status. An engine that finds a request wrong may use other words and codes.",
    )
    for reason in Reason:
        yield from _entry(reason.value, RUNBOOK["reasons"].get(reason.value), f"{ApiError(reason, '').status}: ")
    for title, text, words in (
        ("Outcomes", "How a request ended: `outcome` in the access log and in metrics.", "outcomes"),
        (
            "What a request waited for",
            "The obstacles: `waited_ms` in the access log, `fairgate_held_back_seconds`, `fairgate explain`.",
            "obstacles",
        ),
        ("Why it went to its engine", "`placed` in the access log.", "placed"),
        ("Messages of the gateway", "Warnings and errors on standard error. `%s` and `%d` stand for values.", "log"),
    ):
        yield from ("", f"## {title}", "", text)
        faults = {word: said for word, said in RUNBOOK[words].items() if (said["bad"], said["do"]) == FAULT}
        for word, said in RUNBOOK[words].items():
            if word not in faults:
                yield from _entry(word, said)
        if faults:
            yield from ("", "### Faults of the gateway", "", f"**Do:** {FAULT[1]}", "")
            yield from (f"- {code(word)}: {said['happened']}" for word, said in faults.items())


def _entry(word: str, said: dict[str, str] | None, before: str = "") -> Iterator[str]:
    if said is not None:
        bad = "" if said["bad"] in NOT_BAD else f" **Bad?** {said['bad'].removeprefix('No. ')}"
        do = "" if said["do"] in NOTHING else f" **Do:** {said['do']}"
        yield from ("", f"### {code(word)}", "", f"{before}{said['happened']}{bad}{do}")


def log_messages() -> set[str]:
    """Every warning and error that the gateway may write about itself, as it is written in the code."""
    found = set()
    for path in sorted(path for package in OURS for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("warning", "error", "exception", "critical")
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("logger", "_log")
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return found


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
