"""What is answered at /v1/files and /v1/batches? As OpenAI does, to each tenant of its own."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from gateway.config.sections.usage import BatchesConfig
from gateway.http.errors import ApiError, Reason
from gateway.proxy.batches import batch_tables as tables
from gateway.proxy.batches.batch_objects import (
    UNREADABLE,
    NewBatch,
    StoredFile,
    listed,
    new_batch,
    new_id,
    write_caller,
)
from gateway.proxy.late_answers import LateAnswers
from gateway.proxy.pipeline import Pipeline
from gateway.proxy.request_context import RequestContext
from gateway.request.body.form import read_parts
from gateway.request.body.slices import at_once
from gateway.request.routes import Treatment
from gateway.usage.thread import DatabaseThread
from gateway.usage.written import storable

LISTED_MAX: Final = 100
FILES_LISTED_MAX: Final = 10_000
PASSED_ON: Final = (b"x-fairgate-app", b"x-fairgate-user")


class BatchApi:
    """Answers what the pipeline has for it. `changed` is called when a batch has to be looked at."""

    def __init__(
        self, database: DatabaseThread, limits: BatchesConfig, pipeline: Pipeline, changed: Callable[[], None]
    ) -> None:
        self._do = database.do
        self._limits = limits
        self._changed = changed
        late = LateAnswers(pipeline, self._answer)
        self.tasks = late.tasks
        pipeline.late[Treatment.BATCHES] = late.begin

    async def _answer(self, context: RequestContext) -> dict[str, Any] | None:
        """None: it was answered in pieces."""
        tenant, keep_days = context.tenant, self._limits.keep_days
        match [context.method, *context.path.split("/")[2:]]:
            case ["POST", "files"]:
                return (await self._take_file(context)).shown(keep_days)
            case [_, "files"]:
                asked, limit = _asked(context, FILES_LISTED_MAX, FILES_LISTED_MAX)
                order, than, first = ("ASC", ">", "file-") if asked.get("order") == "asc" else ("DESC", "<", "file-z")
                which = f"purpose LIKE %s AND id {than} %s ORDER BY id {order} LIMIT %s"
                values = (asked.get("purpose", "%"), asked.get("after", first), limit + 1)
                found = await self._do(tables.files, tenant, which, values)
                return listed([file.shown(keep_days) for file in found], limit)
            case [_, "files", file, "content"]:
                await self._send(context, await self._file(tenant, file))
                return None
            case ["DELETE", "files", file]:
                await self._file(tenant, file)
                if batch := await self._do(tables.delete_file, tenant, file):
                    raise _wrong(f"{batch} is not over and reads this file; cancel it first", "file_id")
                return {"id": file, "object": "file", "deleted": True}
            case [_, "files", file]:
                return (await self._file(tenant, file)).shown(keep_days)
            case ["POST", "batches"]:
                return await self._make(context)
            case [_, "batches"]:
                asked, limit = _asked(context, 20, LISTED_MAX)
                page = "id < %s ORDER BY id DESC LIMIT %s", (asked.get("after", "batch_z"), limit + 1)
                return listed(await self._do(tables.batches, tenant, *page), limit)
            case ["POST", _, batch, _]:
                await self._do(tables.cancel, tenant, batch, int(time.time()))
                self._changed()
            case [_, _, batch]:
                pass
        for shown in await self._do(tables.batches, tenant, "id = %s", (batch,)):
            return shown
        raise ApiError(Reason.NOT_FOUND, f"you have no batch '{batch[:100]}'", param="batch_id")

    async def _file(self, tenant: str, file: str, param: str = "file_id") -> StoredFile:
        for found in await self._do(tables.files, tenant, "id = %s", (file,)):
            return found
        raise ApiError(Reason.NOT_FOUND, f"you have no file '{file[:100]}'", param=param)

    async def _take_file(self, context: RequestContext) -> StoredFile:
        """Keep a file that is uploaded."""
        body, limits = context.body, self._limits
        parts = {part.name: part for part in at_once(read_parts(body, context.header(b"content-type") or b""))}
        file, purpose = parts.get("file"), parts.get("purpose")
        if purpose is None or body[purpose.begin : purpose.end] != b"batch":
            raise _wrong("files are kept for batches only: the purpose should be 'batch'", "purpose")
        if file is None:
            raise _wrong("the form has no file", "file")
        content = body[file.begin : file.end]
        context.body = b""
        if content.count(b"\n") >= limits.lines_max + content.endswith(b"\n"):
            raise _wrong(f"the file has more than {limits.lines_max} lines", "file")
        name = storable(file.file_name)[:255] or "file"
        stored = StoredFile(new_id("file-"), "batch", name, len(content), int(time.time()))
        if why := await self._do(tables.begin_file, context.tenant, stored, limits):
            raise _wrong(why, "file")
        lines, rows, n = BytesIO(content), [(0, b"")], 0
        while rows:
            rows = list(enumerate(lines.readlines(tables.PAGE_BYTES), n + 1))
            n += len(rows)
            await self._do(tables.add_lines, stored.id, rows, is_last=not rows)
        return stored

    async def _send(self, context: RequestContext, file: StoredFile) -> None:
        """What is in the file, as fast as the client takes it."""
        responder, may_write, last = context.responder, asyncio.Event(), 0
        may_write.set()
        responder.on_pause, responder.on_resume = may_write.clear, may_write.set
        fields = [(b"content-type", b"application/octet-stream"), context.id_field()]
        responder.start(200, fields, length=file.bytes)
        while page := await self._do(tables.page, file.id, last):
            responder.write(b"".join([line for _, line in page]))
            last = page[-1][0]
            await may_write.wait()
        responder.end()

    async def _make(self, context: RequestContext) -> dict[str, Any]:
        """Begin a batch."""
        try:
            asked = msgspec.json.decode(context.body, type=NewBatch)
        except UNREADABLE as error:
            raise _wrong(str(error), None) from None
        fields = [(name, value) for name, value in context.headers if name in PASSED_ON]
        app = dict(reversed(fields)).get(PASSED_ON[0])
        context.principal.app(app.decode("utf-8", "replace") if app else None)
        if (await self._file(context.tenant, asked.input_file_id, "input_file_id")).purpose != "batch":
            raise _wrong("the purpose of the file should be 'batch'", "input_file_id")
        made, caller = new_batch(asked, int(time.time())), write_caller(context.principal, fields)
        if not await self._do(tables.add_batch, context.tenant, made, caller, self._limits.batches_max):
            message = f"{self._limits.batches_max} of your batches are not over, and no more may be; come back later"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=60.0)
        self._changed()
        return made


def _asked(context: RequestContext, default: int, most: int) -> tuple[dict[str, str], int]:
    """The fields of the query, and how many it wants to see."""
    asked = dict(parse_qsl(context.query.decode("latin-1")))
    limit = asked.get("limit", str(default))
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= most:  # int takes no thousands of digits
        raise _wrong(f"limit should be a number from 1 to {most}", "limit")
    return asked, int(limit)


def _wrong(what: str, param: str | None) -> ApiError:
    return ApiError(Reason.INVALID_REQUEST, what, param=param)
