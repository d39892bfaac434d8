"""Requests that must be refused, with the status of each. Nothing behind them must ever be read as a request.

All but what is tested of them is in order: the path is known and takes what is sent, and the key is one.
"""

from __future__ import annotations

KEY = b"Authorization: Bearer known\r\n"
P = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + KEY
G = b"GET /version HTTP/1.1\r\nHost: x\r\n" + KEY
C = P + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

MALFORMED: dict[str, bytes] = {
    # lengths
    "length and chunked": P + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
    "chunked and length": P + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + END,
    "two lengths that differ": P + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "two lengths that agree": P + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length list": P + b"Content-Length: 5, 5\r\n\r\nhello",
    "length with plus": P + b"Content-Length: +5\r\n\r\nhello",
    "length negative": P + b"Content-Length: -5\r\n\r\nhello",
    "length hexadecimal": P + b"Content-Length: 0x5\r\n\r\nhello",
    "length with underscore": P + b"Content-Length: 1_0\r\n\r\nhellohello",
    "length empty": P + b"Content-Length: \r\n\r\nhello",
    "length of thousands of zeros": P + b"Content-Length: " + b"0" * 5000 + b"5\r\n\r\nhello",
    "length beyond 64 bits": P + b"Content-Length: 99999999999999999999\r\n\r\n",
    "length not ASCII digits": P + "Content-Length: ５\r\n\r\nhello".encode(),
    "length in two spellings of its name": P + b"Content-Length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "length with a second number": P + b"Content-Length: 5 6\r\n\r\nhello",
    "length with vertical tab": P + b"Content-Length: \x0b5\r\n\r\nhello",
    "length with NUL": P + b"Content-Length: 5\x00\r\n\r\nhello",
    "length folded": P + b"Content-Length:\r\n 5\r\n\r\nhello",
    "length, then chunked around a request": P + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "chunked around a request, then length": (
        P + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2b\r\nGET /version?smuggled HTTP/1.1\r\nHost: x\r\n\r\n\r\n" + END
    ),
    # transfer codings
    "coding misspelt, with a length": P + b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\nhello",
    "coding behind a space before the colon": P + b"Transfer-Encoding : chunked\r\n\r\n" + END,
    "coding folded": P + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + END,
    "coding behind a bare LF": P + b"A: b\nTransfer-Encoding: chunked\r\n\r\n" + END,
    "coding behind a bare CR": P + b"A: b\rTransfer-Encoding: chunked\r\n\r\n" + END,
    "coding with NUL": P + b"Transfer-Encoding: chunked\x00\r\n\r\n" + END,
    "coding with a parameter": P + b"Transfer-Encoding: chunked;a=b\r\n\r\n" + END,
    "coding and an empty one": P + b"Transfer-Encoding: chunked,\r\n\r\n" + END,
    "coding in two fields, the second unknown": (
        P + b"Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n" + END
    ),
    "coding identity": P + b"Transfer-Encoding: identity\r\n\r\n",
    "coding unknown": P + b"Transfer-Encoding: xchunked\r\n\r\n" + END,
    "coding not last": P + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + END,
    "coding twice": P + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + END,
    "coding in two fields": P + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
    "coding empty": P + b"Transfer-Encoding:\r\n\r\n" + END,
    "coding with vertical tab": P + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + END,
    "coding in quotes": P + b'Transfer-Encoding: "chunked"\r\n\r\n' + END,
    "coding in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
    # chunks
    "chunk size by bare LF": C + b"5\nhello\r\n" + END,
    "chunk size by bare CR": C + b"5\rhello\r\n" + END,
    "chunk data by bare LF": C + b"5\r\nhello\n" + END,
    "chunk longer than said": C + b"5\r\nhelloX\r\n" + END,
    "chunk shorter than said": C + b"7\r\nhello\r\n" + END,
    "chunk size 0x": C + b"0x5\r\nhello\r\n" + END,
    "chunk size plus": C + b"+5\r\nhello\r\n" + END,
    "chunk size negative": C + b"-5\r\nhello\r\n" + END,
    "chunk size empty": C + b"\r\nhello\r\n" + END,
    "chunk size not hexadecimal": C + b"G\r\nhello\r\n" + END,
    "chunk size space before": C + b" 5\r\nhello\r\n" + END,
    "chunk size space after": C + b"5 \r\nhello\r\n" + END,
    "chunk size overflow": C + b"10000000000000005\r\nhello\r\n" + END,
    "chunk size of many zeros": C + b"0" * 17 + b"5\r\nhello\r\n" + END,
    "chunk size with a fraction": C + b"5.0\r\nhello\r\n" + END,
    "chunk size behind NUL": C + b"\x005\r\nhello\r\n" + END,
    "chunk extension bare LF": C + b"5;a\nb\r\nhello\r\n" + END,
    "chunk extension NUL": C + b"5;a\x00b\r\nhello\r\n" + END,
    "chunk extension quoted line": C + b'5;a="x\r\ny"\r\nhello\r\n' + END,
    "chunk extension endless": C + b"5;" + b"a" * 70000 + b"\r\nhello\r\n" + END,
    "chunk extensions everywhere": C + (b"1;" + b"a" * 100 + b"\r\nx\r\n") * 1000 + END,
    "last chunk by bare LF": C + b"5\r\nhello\r\n0\n\r\n",
    "trailer part by bare LF": C + b"5\r\nhello\r\n0\r\n\n",
    "trailer by bare LF": C + b"5\r\nhello\r\n0\r\nA: b\n\r\n",
    "trailer space before colon": C + b"5\r\nhello\r\n0\r\nA : b\r\n\r\n",
    "trailer length": C + b"5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n",
    "trailer coding": C + b"5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "trailer folded": C + b"5\r\nhello\r\n0\r\nA: b\r\n c\r\n\r\n",
    "trailers endless": C + b"0\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    # field lines
    "space before colon": G + b"A : b\r\n\r\n",
    "tab before colon": G + b"A\t: b\r\n\r\n",
    "space before colon of length": P + b"Content-Length : 5\r\n\r\nhello",
    "folded line": G + b"A: b\r\n c\r\n\r\n",
    "folded line by tab": G + b"A: b\r\n\tc\r\n\r\n",
    "space before the first field": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "bare LF between fields": G + b"A: b\nB: c\r\n\r\n",
    "bare LF everywhere": b"GET / HTTP/1.1\nHost: x\n\n",
    "bare LF at the end of the head": G + b"A: b\r\n\n",
    "bare CR in a value": G + b"A: b\rB: c\r\n\r\n",
    "bare CR at the end": G + b"A: b\r\r\n\r\n",
    "NUL in a value": G + b"A: b\x00c\r\n\r\n",
    "control byte in a value": G + b"A: b\x01c\r\n\r\n",
    "escape in a value": G + b"A: \x1b[2J\r\n\r\n",
    "DEL in a value": G + b"A: b\x7f\r\n\r\n",
    "NUL in a name": G + b"A\x00: b\r\n\r\n",
    "name not ASCII": G + b"\xc3\xa9: b\r\n\r\n",
    "name empty": G + b": b\r\n\r\n",
    "name with separators": G + b"A(b): c\r\n\r\n",
    "no colon": G + b"Ab\r\n\r\n",
    # Host
    "no Host": b"GET / HTTP/1.1\r\nA: b\r\n\r\n",
    "two Hosts": G + b"Host: y\r\n\r\n",
    "two equal Hosts": G + b"Host: x\r\n\r\n",
    "Host with path": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "Host with user": b"GET / HTTP/1.1\r\nHost: u@x\r\n\r\n",
    # request lines
    "absolute target of another scheme": b"GET ftp://x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute target with user": b"GET http://u@x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute target without host": b"GET http:///a HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute target without Host field": b"GET http://x/ HTTP/1.1\r\n\r\n",
    "authority target": b"GET x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk target": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk and more": b"OPTIONS *a HTTP/1.1\r\nHost: x\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\nHost: x\r\n\r\n",
    "fragment in target": b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n",
    "target not ASCII": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "control byte in target": b"GET /a\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
    "space in target": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tab for space": b"GET\t/\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "space at the end of the line": b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n",
    "space before the method": b" GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "method in lower case": b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    "method with NUL": b"GE\x00T / HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "another protocol": b"GET / RTSP/1.0\r\nHost: x\r\n\r\n",
    "protocol in lower case": b"GET / http/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.10": b"GET / HTTP/1.10\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "JSON without HTTP": b'{"model": "m"}\r\n\r\n',
    # what is not offered
    # sizes
}
"""400 is the answer to each."""
UNSUPPORTED: dict[str, tuple[bytes, int]] = {
    "length beyond the limit": (P + b"Content-Length: 18446744073709551615\r\n\r\n", 413),
    "coding before chunked": (P + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + END, 501),
    "coding hidden by another": (P + b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n" + END, 501),
    "chunk size of 64 bits": (C + b"ffffffffffffffff\r\nhello\r\n" + END, 413),
    "chunk announced beyond the limit": (C + b"5\r\nhello\r\nfffffff\r\n", 413),
    "chunk announced beyond the limit with the ones before": (C + b"5\r\nhello\r\n1fffffd\r\nx", 413),
    "absolute target to connect to": (b"CONNECT http://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "method unknown": (b"FROB / HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", 505),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    "HTTP/1": (b"GET / HTTP/1\r\nHost: x\r\n\r\n", 505),
    "HTTP/2 prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 505),
    "CONNECT": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "unknown expectation": (P + b"Expect: a-miracle\r\nContent-Length: 5\r\n\r\nhello", 417),
    "body announced too large": (P + b"Content-Length: 99999999\r\n\r\n" + b"x" * 1000, 413),
    "header too large": (G + b"A: " + b"b" * 70000 + b"\r\n\r\n", 431),
    "header endless": (G + b"A: " + b"b" * 700000, 431),
    "too many fields": (G + b"A: b\r\n" * 201 + b"\r\n", 431),
    "target too long": (b"GET /" + b"a" * 17000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "target endless": (b"GET /" + b"a" * 170000, 414),
}
REFUSED = {name: (sent, 400) for name, sent in MALFORMED.items()} | UNSUPPORTED

ODD_BUT_LEGAL: dict[str, bytes] = {
    "plain": G + b"\r\n",
    "empty line before": b"\r\n" + G + b"\r\n",
    "HTTP/1.0 without Host": b"GET / HTTP/1.0\r\n\r\n",
    "length with leading zero": P + b"Content-Length: 05\r\n\r\nhello",
    "length with space around": P + b"Content-Length:   5 \r\n\r\nhello",
    "coding in capitals": P + b"Transfer-Encoding: CHUNKED\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunk size with zeros and capitals": C + b"000A\r\nhellohello\r\n0\r\n\r\n",
    "chunk extension": C + b"5;a=b\r\nhello\r\n0\r\n\r\n",
    "trailer": C + b"5\r\nhello\r\n0\r\nA: b\r\n\r\n",
    "empty value": G + b"A:\r\n\r\n",
    "value in UTF-8": G + "A: é\r\n\r\n".encode(),
    "IPv6 Host": b"GET / HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n",
    "percent and query": b"GET /a%20b?c=d&e=%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "upgrade to websocket": G + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "upgrade to h2c, as Java's client asks": (
        G + b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n\r\n"
    ),
    "upgrade to h2c with a body": (P + b"Connection: upgrade\r\nUPGRADE: h2c\r\nContent-Length: 5\r\n\r\nhello"),
    "upgrade to h2c with a chunked body": (
        P + b"Upgrade: h2c\r\nUpgrade: x\r\nConnection: upgrade\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n0\r\n\r\n"
    ),
    "absolute target": b"GET http://x/a?b HTTP/1.1\r\nHost: y\r\n\r\n",
    "absolute target without path": b"GET https://[::1]:80?b HTTP/1.1\r\nHost: y\r\n\r\n",
    "asterisk target": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "repeated field": G + b"A: b\r\nA: c\r\n\r\n",
}
