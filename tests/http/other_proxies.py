"""Where nginx and HAProxy, as Debian ships them, do otherwise than the table says of fairgate, and why.

What is not listed they do alike. Most of it is leniency that RFC 9112 allows to a proxy which writes each request anew;
fairgate refuses what can be read in two ways, since it cannot know who stands in front of it.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.http.conformance import FOLLOWS, Case, Outcome


class Difference(NamedTuple):
    why: str
    statuses: tuple[int, ...]
    """What the client is answered; a second 200 is that of the request behind the case."""
    cases: tuple[str, ...]
    line: bytes = b""
    """What reaches the engine, where that is not the line that was sent."""
    only_sometimes: bool = False
    """Whether it does otherwise depends on which bytes come first."""

    def outcome(self, case: Case) -> Outcome:
        served = self.statuses.count(200)
        line = self.line or case.sent.lstrip(b"\r\n").split(b"\n", 1)[0].rstrip(b"\r ")
        own = (line,) if served or self.line else ()
        return Outcome(self.statuses, own + (FOLLOWS,) * (served > 1))


SERVED = (200, 200)
VERSION = b"GET /version HTTP/1.1"
PLAIN = b"GET / HTTP/1.1"
FOR_THE_ENGINE = (
    "a method that is not offered there", "OPTIONS needs no key", "OPTIONS of nothing", "no key", "no such path",
    "a method nobody knows", "method unknown",
)  # fmt: skip
SPELLINGS = (
    "a path in another spelling", "a path that climbs", "a path that climbs in percent", "a path with a dot",
    "a path with a slash in percent", "a path with a backslash", "a path with a parameter", "a path in percent",
    "a path with a slash at its end",
)  # fmt: skip
BARE_LF = (
    "coding behind a bare LF", "chunk size by bare LF", "chunk data by bare LF", "last chunk by bare LF",
    "trailer part by bare LF", "trailer by bare LF", "bare LF between fields", "bare LF everywhere",
    "bare LF at the end of the head",
)  # fmt: skip
TRAILERS = ("a trailer that would be a length", "trailer length", "trailer coding", "trailer folded")
ZEROS = ("a length of thousands of zeros", "length of thousands of zeros", "chunk size of many zeros")
CONTROLS = ("control byte in a value", "escape in a value", "DEL in a value")
WITH_BODY = ("content of a GET is refused, unread", "a request in the body of another")
EXPECTATIONS = ("another expectation", "unknown expectation")

NGINX = (
    Difference("asks for no key and knows no routes: that is for the engine", SERVED, FOR_THE_ENGINE),
    Difference("passes a path as it is written", SERVED, SPELLINGS),
    Difference("finds a NUL in the path", (400,), ("a path with NUL in percent",)),
    Difference("passes content of any method", SERVED, WITH_BODY),
    Difference("passes over an expectation that it does not know", SERVED, EXPECTATIONS),
    Difference("says 100 though the body is there", (100, 200, 200), ("a body that is there needs no 100",)),
    Difference(
        "asks for the body of whoever comes, and takes what follows for it",
        (100, 200, 400),
        ("no 100 for whom nobody knows",),
    ),
    Difference("takes a bare LF for the end of a line", SERVED, BARE_LF),
    Difference("takes a CR before the end of a line for a part of it", SERVED, ("bare CR at the end",)),
    Difference("drops trailers unread, and writes the length of the body", SERVED, TRAILERS),
    Difference("drops trailers unread", SERVED, ("trailer space before colon", "trailers endless")),
    Difference(
        "drops chunk extensions unread, however long",
        SERVED,
        ("chunk size space after", "chunk extension NUL", "chunk extension endless", "chunk extensions everywhere"),
    ),
    Difference("counts no zeros", SERVED, ZEROS),
    Difference("passes control bytes of a value, but NUL", SERVED, CONTROLS),
    Difference("drops a field whose name is none", SERVED, ("name not ASCII", "name with separators", "no colon")),
    Difference("bounds the bytes of a head, not its fields", SERVED, ("too many fields",)),
    Difference("takes more for a host", SERVED, ("Host with user",)),
    Difference("passes other bytes of a target", SERVED, ("fragment in target", "target not ASCII")),
    Difference("forgives spaces in the request line", SERVED, ("space at the end of the line",)),
    Difference("forgives spaces in the request line", SERVED, ("two spaces",), PLAIN),
    Difference("knows every 1.x, as RFC 9110, 2.5 allows", SERVED, ("a higher minor version is not known",), VERSION),
    Difference("knows every 1.x, as RFC 9110, 2.5 allows", SERVED, ("HTTP/1.2", "HTTP/1.10"), PLAIN),
    Difference("finds no version", (400,), ("HTTP/1", "prior knowledge of HTTP/2", "HTTP/2 prior knowledge")),
    Difference("answers HTTP/0.9 in HTTP/0.9, without a status", (), ("HTTP/0.9",), PLAIN),
    Difference(
        "keeps a connection of HTTP/1.0 that asks for it",
        SERVED,
        ("HTTP/1.0 ends, too, where the length of the answer is not known",),
        VERSION,
    ),
    Difference("takes any scheme", SERVED, ("absolute form of another scheme",), VERSION),
    Difference("takes any scheme", SERVED, ("absolute target of another scheme",), PLAIN),
    Difference(
        "asks for / where there is no path", SERVED, ("asterisk form of an absolute target",), b"OPTIONS / HTTP/1.1"
    ),
    Difference("knows no asterisk", (400,), ("asterisk form",)),
    Difference("refuses TRACE and CONNECT itself", (405,), ("TRACE is not offered", "absolute target to connect to")),
    Difference("finds no path", (400,), ("CONNECT is not offered", "CONNECT")),
    Difference("takes no tab before a length", (400,), ("a length behind white space",)),
    Difference("has no number so large", (400,), ("length beyond the limit", "chunk size of 64 bits")),
    Difference("says 400 of a large head", (400,), ("header too large", "header endless")),
    Difference("takes one Transfer-Encoding only", (400,), ("coding hidden by another",)),
    Difference(
        "says 501 of every coding but 'chunked', written so",
        (501,),
        (
            "chunked is not last", "chunks in capitals behind a tab", "coding misspelt, with a length",
            "coding with a parameter", "coding and an empty one", "coding identity", "coding unknown",
            "coding not last", "coding twice", "coding empty", "coding with vertical tab", "coding in quotes",
        ),
    ),
)  # fmt: skip

HAPROXY = (
    Difference("asks for no key and knows no routes: that is for the engine", SERVED, FOR_THE_ENGINE),
    Difference(
        "offers what the engine may offer",
        SERVED,
        (
            "TRACE is not offered", "CONNECT is not offered", "CONNECT", "asterisk form", "asterisk target",
            "asterisk form is for OPTIONS", "asterisk form of an absolute target", "asterisk and more",
            "methods are told apart by case", "method in lower case",
        ),
    ),
    Difference("passes a path as it is written", SERVED, (*SPELLINGS, "a path with NUL in percent")),
    Difference("bounds the head as a whole", SERVED, ("target too long",)),
    Difference("passes content of any method", SERVED, WITH_BODY),
    Difference("leaves expectations to the engine", SERVED, EXPECTATIONS),
    Difference(
        "passes a body of whoever comes, and takes what follows for it", (200, 400),
        ("no 100 for whom nobody knows",),
    ),
    Difference("takes a bare LF for the end of a line", SERVED, BARE_LF),
    Difference("drops trailers unread", SERVED, TRAILERS),
    Difference(
        "refuses an ill-formed trailer unless the engine has answered", SERVED, ("trailer space before colon",),
        only_sometimes=True,
    ),
    Difference(
        "drops chunk extensions unread", SERVED,
        ("chunk size space after", "chunk extension NUL", "chunk extensions everywhere"),
    ),
    Difference("counts no zeros", SERVED, ZEROS),
    Difference("passes control bytes of a value", SERVED, (*CONTROLS, "NUL in a value")),
    Difference(
        "unfolds a line", SERVED,
        ("a folded line", "folded line", "folded line by tab", "length folded", "coding folded"),
    ),
    Difference(
        "takes lengths that agree for one, as RFC 9112, 6.3 allows", SERVED,
        ("two lengths that agree", "length list", "length in two spellings of its name"),
    ),
    Difference(
        "goes by the chunks where there is a length, too, drops the length, and ends, as RFC 9112, 6.3 allows", (200,),
        (
            "length and chunked", "chunked and length", "length, then chunked around a request",
            "chunked around a request, then length",
        ),
    ),
    Difference("knows chunks in HTTP/1.0, and ends", (200,), ("chunks in HTTP/1.0", "coding in 1.0")),
    Difference("passes over an empty member of a list", SERVED, ("coding and an empty one",)),
    Difference(
        "says 422 of a coding before chunked", (422,),
        ("an unknown coding", "coding before chunked", "coding hidden by another"),
    ),
    Difference("asks for no Host", SERVED, ("no Host", "absolute target without Host field")),
    Difference("takes anything for a host", SERVED, ("two equal Hosts", "Host with path", "Host with user")),
    Difference(
        "takes any scheme and authority", SERVED,
        ("absolute target of another scheme", "absolute target with user", "absolute target without host"),
    ),
    Difference(
        "wants the authority of the target and the Host to agree", (400,),
        ("absolute form", "absolute form in TLS's scheme"),
    ),
    Difference("finds no authority to connect to", (400,), ("absolute target to connect to",)),
    Difference("forgives white space in the request line", SERVED, ("two spaces", "tab for space"), PLAIN),
    Difference("answers every later version as 1.1", SERVED, ("HTTP/1.2", "HTTP/2.0"), PLAIN),
    Difference(
        "answers every later version as 1.1", SERVED,
        ("a higher minor version is not known", "another major version is refused"), VERSION,
    ),
    Difference("finds no version", (400,), ("HTTP/1",)),
    Difference(
        "takes the preface of HTTP/2, and finds no frame behind it", (),
        ("prior knowledge of HTTP/2", "HTTP/2 prior knowledge"),
    ),
    Difference(
        "keeps a connection of HTTP/1.0 that asks for it", SERVED,
        ("HTTP/1.0 ends, too, where the length of the answer is not known",),
    ),
    Difference("HTTP/1.0 is the version that it answers in", (200,), ("HTTP/1.0 is answered and ends",)),
    Difference("has no number so large", (400,), ("chunk size of 64 bits",)),
    Difference(
        "says 400 of a large head", (400,),
        ("header too large", "header endless", "too many fields", "target endless"),
    ),
    Difference(
        "bounds no body: passes its beginning, and the engine waits for the rest", (504,),
        (
            "a length beyond the limit", "a chunk beyond the limit, as soon as it is announced",
            "length beyond the limit",
            "chunk announced beyond the limit", "chunk announced beyond the limit with the ones before",
            "body announced too large",
        ),
    ),
)  # fmt: skip
