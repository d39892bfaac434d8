"""Loader of configuration files: YAML becomes a Config, or a list of all faults with their places.

Scalars follow a narrow YAML 1.2: true and false are the only booleans, plain decimals the only numbers. Everything else
is text, so that `no`, `010` and `12:30:45` stay as they are written.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.config.checks import split_address
from gateway.config.contradictions import Loc, contradictions, path_of
from gateway.config.model import Config

FILE_BYTES_MAX = 4 * 1024 * 1024
DEPTH_MAX = 20
NODES_MAX = 500_000
FAULTS_MAX = 100
FAULTS_FOUND_MAX = 1000
"""Faults that are located in one config; an operator with more of them fixes some first."""

_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?")
_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")  # up to the first brace, so that none is searched twice
_IN_BRACES = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:(:-)(.*))?", re.DOTALL)
_CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a section of fields",
    "dict_type": "a section of fields",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and its place. Line and column count from 1; line 0 is the whole file."""

    file: str
    line: int
    column: int
    path: str
    message: str
    is_warning: bool = False
    """True if the value is valid, but probably a mistake."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        place += ": warning" if self.is_warning else ""
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class Finding(NamedTuple):
    """A fault in a loaded configuration, whose place in the file is not resolved yet."""

    loc: Loc
    message: str
    is_warning: bool = False


class ConfigError(Exception):
    """The configuration cannot be used; `faults` lists all reasons in the order of the file."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def load_config(path: str | os.PathLike[str], **options: Any) -> Config:
    """Read a configuration file. Raise ConfigError with every fault; its text never holds a substituted value.

    `options`: values from the command line, which override the file (`_override`).
    """
    source = _Source(os.fspath(path))
    try:
        return _validated(source.read(), source, **options)
    finally:
        source.forget()


def check_config(
    path: str | os.PathLike[str], look: Callable[[Config], Iterable[Finding]]
) -> tuple[Config, list[Fault]]:
    """Read a configuration file and locate the findings of `look` in it. Raise ConfigError as `load_config` does."""
    source = _Source(os.fspath(path))
    config = _validated(source.read(), source)
    return config, [replace(source.fault_at(loc, text), is_warning=warns) for loc, text, warns in look(config)]


def config_for_backends(urls: list[str], **options: Any) -> Config:
    """Return the configuration of a gateway without a file: one pool, and a tenant for every key without a name.

    Raise ConfigError, for instance for an invalid URL or a port that the admin listener has.
    """
    pools = [{"name": "default", "backends": [{"url": url} for url in urls]}]
    return _validated({"open_access": True, "pools": pools}, _Source("command line"), **options)


def _override(
    data: dict[str, Any], *, host: str | None = None, port: int | None = None, admin_port: int | None = None, **own: Any
) -> None:
    """Replace settings of the file by those of the command line that are not None: the first address of `listen`, the
    port of `admin`, and `own` by their names. An invalid address is kept, to be reported."""
    data |= {field: value for field, value in own.items() if value is not None}
    for field, new_host, new_port in (("listen", host, port), ("admin", None, admin_port)):
        text = data.get(field) or Config.model_fields[field].default
        text = text[0] if isinstance(text, list | tuple) else text
        own_host, own_port = split_address(text) if isinstance(text, str) else ("", -1)
        if (new_host, new_port) != (None, None) and own_port >= 0:
            to, at = own_host if new_host is None else new_host, own_port if new_port is None else new_port
            data[field] = f"[{to}]:{at}" if ":" in to else f"{to}:{at}"


def _bounded(faults: list[Fault], file: str) -> list[Fault]:
    ordered = sorted(dict.fromkeys(faults), key=lambda fault: (fault.line, fault.column))
    if len(ordered) <= FAULTS_MAX:
        return ordered
    more = len(ordered) - FAULTS_MAX if len(ordered) < FAULTS_FOUND_MAX else "many"
    return [*ordered[:FAULTS_MAX], Fault(file, 0, 0, "", f"and {more} more faults")]


class _Loader(yaml.BaseLoader):
    """A YAML loader with a bound on nodes. A node keeps only line and column, since marks take most of the memory."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > NODES_MAX:
            raise _TooManyNodesError
        node = super().compose_node(parent, index)
        if node is not None and not isinstance(node.start_mark, tuple):  # the node behind an alias is marked already
            node.start_mark = (node.start_mark.line + 1, node.start_mark.column + 1)
            node.end_mark = None
        return node


class _TooManyNodesError(Exception):
    """The text has more than NODES_MAX nodes."""


class _Source:
    """A file: its data as plain values, the node at every place, and the faults of the text."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults: list[Fault] = []
        self.keys: dict[Loc, yaml.Node] = {}
        self.values: dict[Loc, yaml.Node] = {}

    def forget(self) -> None:
        """Free the nodes one by one. Freeing a large tree at once would stall every thread."""
        while self.keys:
            self.keys.popitem()
        while self.values:
            _, node = self.values.popitem()  # the contents of a node follow it
            while isinstance(node, yaml.CollectionNode) and node.value:
                node.value.pop()

    def read(self) -> dict[str, Any]:
        """Return the top-level mapping and collect `faults`. Raise ConfigError if the text has no mapping."""
        text = self._text()
        try:
            # A stream is parsed in pieces, which gives other threads their turns.
            root = yaml.compose(io.StringIO(text), Loader=_Loader)
        except _TooManyNodesError:
            raise self._refused(f"holds more than {NODES_MAX} values") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            # The text after * or ! names an alias or a tag, but may be an unquoted password.
            problem = re.sub(r"'[A-Za-z0-9_!-]{2,}'", "(not shown)", error.problem or error.context or "")
            raise self._refused(f"not YAML: {problem}", line, column) from None
        except (yaml.YAMLError, ValueError):
            raise self._refused("not YAML", 1, 1) from None
        except RecursionError:
            raise self._refused("nested too deeply") from None
        if root is None:
            raise self._refused("is empty; see config.example.yaml for a start")
        if not isinstance(root, yaml.MappingNode):
            raise self._refused("should be fields, such as `pools:`", *_place(root))
        return self._mapping(root, ())

    def _refused(self, message: str, line: int = 0, column: int = 0) -> ConfigError:
        """Return the error of a text that cannot be read any further."""
        return ConfigError([Fault(self.file, line, column, "", message)])

    def _text(self) -> str:
        try:
            with open(self.file, "rb") as stream:
                raw = stream.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise self._refused(f"cannot be read: {error.strerror}") from None
        except ValueError:
            raise self._refused("is not the name of a file") from None
        if len(raw) > FILE_BYTES_MAX:
            raise self._refused(f"is larger than {FILE_BYTES_MAX} bytes")
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode("utf-8", "replace")
            raise self._refused("not UTF-8", before.count("\n") + 1, len(before) - before.rfind("\n")) from None
        if bad := _CONTROL.search(text):
            before = text[: bad.start()]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            raise self._refused(f"character U+{ord(bad[0]):04X} is not allowed", line, column)
        return text

    def _value(self, node: yaml.Node, loc: Loc) -> Any:
        self.values[loc] = node
        if len(self.values) > NODES_MAX:
            raise self._refused(f"holds more than {NODES_MAX} values, aliases expanded", *_place(node))
        if len(loc) > DEPTH_MAX:
            raise self._refused(f"is nested more than {DEPTH_MAX} deep", *_place(node))
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in ("str", "seq", "map"):
            self._fault(loc, "YAML tags (!) are not supported")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*loc, i)) for i, item in enumerate(node.value)]
        quoted = isinstance(node, yaml.ScalarNode) and node.style
        return self._text_with_variables(node.value, loc) if quoted else self._plain(node.value, loc)

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        self.values[loc] = node
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.faults.append(Fault(self.file, *_place(key), _path(loc), "the name of a field should be text"))
                continue
            place: Loc = (*loc, key.value)
            if key.value in found:
                first = _place(self.keys[place])[0]
                message = f"given twice, first on line {first}"
                self.faults.append(Fault(self.file, *_place(key), _path(place), message))
                continue
            self.keys[place] = key
            found[key.value] = self._value(value, place)
        return found

    def _plain(self, text: str, loc: Loc) -> Any:
        if text in ("", "~", "null"):
            return None
        if text in ("true", "false"):
            return text == "true"
        if number := _NUMBER.fullmatch(text):
            return float(text) if number[2] or number[3] else int(text)
        return self._text_with_variables(text, loc)

    def _text_with_variables(self, text: str, loc: Loc) -> str:
        def replaced(found: re.Match[str]) -> str:
            if found[0] == "$${":
                return "${"
            variable = _IN_BRACES.fullmatch(found[1]) if found[2] else None
            if variable is None:
                self._fault(loc, "write a variable as ${NAME} or ${NAME:-default}, and a plain ${ as $${")
                return ""
            name, has_default, default = variable.groups()
            value = os.environ.get(name)
            if has_default:
                return value or default
            if value is None:
                self._fault(loc, f"the environment variable {name} is not set")
            return value or ""

        return _VARIABLE.sub(replaced, text)

    def _fault(self, loc: Loc, message: str) -> None:
        self.faults.append(self.fault_at(loc, message))

    def written(self, loc: Loc) -> Loc:
        """Return the place that is written in the file: a bare string may stand for a section and its fields."""
        while isinstance(self.values.get(loc[:-1]), yaml.ScalarNode) and loc[:-1]:
            loc = loc[:-1]
        return loc

    def fault_at(self, loc: Loc, message: str, *, of_key: bool = False) -> Fault:
        """Return a fault at the line and column of a key or value, or of the nearest section around it."""
        around = loc = self.written(loc)
        while around and around not in self.values:
            around = around[:-1]
        node = (self.keys.get(loc) if of_key else None) or self.values.get(around)
        return Fault(self.file, *(_place(node) if node is not None else (0, 0)), _path(loc), message)


def _place(node: yaml.Node) -> tuple[int, int]:
    place: Any = node.start_mark  # set by `_Loader`
    line, column = place
    return line, column


def _path(loc: Loc) -> str:
    """Return the path without field names that may be a key or a password."""
    return path_of(tuple(part if isinstance(part, int) else _name_or_hidden(part) for part in loc))


def _name_or_hidden(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_.<-]{1,32}", name) else "(a name not shown)"


def _validated(data: dict[str, Any], source: _Source, **options: Any) -> Config:
    """Validate the data under the command line's options. Raise ConfigError with the faults of the text and of the
    values."""
    _override(data, **options)
    faults = source.faults
    # A value whose text is faulty (an unset variable, say) is not reported a second time.
    faulty = {(fault.line, fault.column) for fault in faults if fault.line}
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        explained = [_explained(found, source) for found in error.errors(include_url=False)[:FAULTS_FOUND_MAX]]
    else:
        explained = [source.fault_at(*found) for found in islice(contradictions(config), FAULTS_FOUND_MAX)]
    faults = faults + [fault for fault in explained if (fault.line, fault.column) not in faulty]
    if faults:
        raise ConfigError(_bounded(faults, source.file))
    return config


def _explained(error: ErrorDetails, source: _Source) -> Fault:
    """Return pydantic's error as a fault, with its place in the file."""
    message = _message(error, source.values.get(source.written(error["loc"])))
    return source.fault_at(error["loc"], message, of_key=error["type"] == "extra_forbidden")


def _message(error: ErrorDetails, node: yaml.Node | None) -> str:
    """Return the sentence on a pydantic error, with advice where there is some."""
    kind = error["type"]
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        loc = error["loc"]
        return f"unknown field{_did_you_mean(str(loc[-1]), list(_model_at(loc[:-1]).model_fields))}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        wrong = node.value if isinstance(node, yaml.ScalarNode) else ""
        return f"should be {' or '.join(choices)}{_did_you_mean(wrong, choices)}"
    if kind in _KINDS:
        return f"should be {_KINDS[kind]}, not {_found(error['input'])}{_advice(kind, error['input'], node)}"
    return error["msg"].removeprefix("Input ").replace("Tuple should", "should").replace("String should", "should")


def _did_you_mean(wrong: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(wrong[:64], choices, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _found(value: object) -> str:
    names = {
        bool: "true or false",
        int: "a number",
        float: "a fraction",
        str: "text",
        list: "a list",
        dict: "a section",
    }
    return names.get(type(value), "nothing")


def _advice(kind: str, value: object, node: yaml.Node | None) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if kind in ("int_type", "float_type") and isinstance(node, yaml.ScalarNode) and isinstance(value, str):
        if "${" in node.value:
            return "; a variable always gives text, so write the number here"
        return "; write plain decimal digits, without quotes, leading zeros, underscores or colons"
    return ""


def _model_at(loc: Loc) -> type[BaseModel]:
    """Return the model of the section at a place."""
    model: type[BaseModel] = Config
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
