"""Prints what Starlette reads of forms, as JSON. Runs in vLLM's environment; takes [[content-type, base64], ...]."""

import asyncio
import base64
import json
import sys


async def _read(label: str, body: bytes) -> dict[str, str]:
    from starlette.datastructures import UploadFile
    from starlette.requests import Request

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", label.encode()), (b"content-length", str(len(body)).encode())]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    form = await request.form()
    return {name: "" if isinstance(value, UploadFile) else value for name, value in form.items()}


async def main() -> None:
    print(json.dumps([await _read(label, base64.b64decode(body)) for label, body in json.load(sys.stdin)]))


asyncio.run(main())
