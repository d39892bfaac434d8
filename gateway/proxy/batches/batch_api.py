"""The answers at /v1/files and /v1/batches, in OpenAI's format. Each tenant sees its own files and batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from gateway.config.model import Config
from gateway.http.errors import ApiError, Reason
from gateway.http.headers import header_of
from gateway.proxy.background_handler import BackgroundHandler
from gateway.proxy.batches import batch_objects as objects
from gateway.proxy.batches import batch_tables as tables
from gateway.proxy.pipeline import Pipeline
from gateway.proxy.request_context import RequestContext
from gateway.request.body.form import read_parts
from gateway.request.routes import RouteKind
from gateway.storage.store_errors import StoreUnavailable
from gateway.usage.thread import DatabaseThread
from gateway.usage.written import storable

LISTED_MAX: Final = 100
FILES_LISTED_MAX: Final = 10_000
NEW_BATCH_BYTES_MAX: Final = 1 << 16
PASSED_ON: Final = (b"x-fairgate-app", b"x-fairgate-user")


class BatchApi:
    """The handler of requests for files and batches. `changed` is called after a batch was created or cancelled."""

    def __init__(
        self, database: DatabaseThread, config: Config, pipeline: Pipeline, changed: Callable[[], None]
    ) -> None:
        self._do = database.do_for
        self._limits = config.batches
        self._line_bytes_max = config.bounds.line_bytes
        self._changed = changed
        late = BackgroundHandler(pipeline, self._answer)
        self.tasks = late.tasks
        pipeline.late[RouteKind.BATCHES] = late.begin

    async def _answer(self, context: RequestContext) -> dict[str, Any] | None:
        """Return the answer as a value for JSON, or None if it was sent in pieces."""
        tenant, keep_days = context.tenant, self._limits.keep_days
        match [context.method, *context.path.split("/")[2:]]:
            case ["POST", "files"]:
                return (await self._upload(context)).shown(keep_days)
            case [_, "files"]:
                asked, limit = _list_query(context, FILES_LISTED_MAX, FILES_LISTED_MAX)
                order, than, first = ("ASC", ">", "file-") if asked.get("order") == "asc" else ("DESC", "<", "file-z")
                which = f"purpose LIKE %s AND id {than} %s ORDER BY id {order} LIMIT %s"
                values = (asked.get("purpose", "%"), asked.get("after", first), limit + 1)
                found = await self._do(tenant, tables.files, tenant, now_s(), which, values)
                return objects.listed([file.shown(keep_days) for file in found], limit)
            case [_, "files", file, "content"]:
                await self._send_content(context, await self._find_file(tenant, file))
                return None
            case ["DELETE", "files", file]:
                await self._find_file(tenant, file)
                if batch := await self._do(tenant, tables.hide_file, tenant, file):
                    raise _invalid(f"{batch} is not over and reads this file; cancel it first", "file_id")
                await asyncio.shield(self.tasks.start(self._delete(tenant, file)))
                return {"id": file, "object": "file", "deleted": True}
            case [_, "files", file]:
                return (await self._find_file(tenant, file)).shown(keep_days)
            case ["POST", "batches"]:
                return await self._create_batch(context)
            case [_, "batches"]:
                asked, limit = _list_query(context, 20, LISTED_MAX)
                page = "id < %s ORDER BY id DESC LIMIT %s", (asked.get("after", "batch_z"), limit + 1)
                return objects.listed(await self._do(tenant, tables.batches, tenant, *page), limit)
            case ["POST", _, batch, _]:
                await self._do(tenant, tables.cancel, tenant, batch, now_s())
                self._changed()
            case [_, _, batch]:
                pass
        for shown in await self._do(tenant, tables.batches, tenant, "id = %s", (batch,)):
            return shown
        raise ApiError(Reason.NOT_FOUND, f"you have no batch '{batch[:100]}'", param="batch_id")

    async def _find_file(self, tenant: str, file: str, param: str = "file_id") -> objects.StoredFile:
        """Return a file of the tenant. Raise `ApiError` 404 if the tenant has none of this id."""
        for found in await self._do(tenant, tables.files, tenant, now_s(), "id = %s", (storable(file),)):
            return found
        raise ApiError(Reason.NOT_FOUND, f"you have no file '{file[:100]}'", param=param)

    async def _delete(self, tenant: str, file: str) -> None:
        """Delete a hidden file, some lines at a time. After a fault the batch lane deletes the rest."""
        with suppress(StoreUnavailable):
            while await self._do(tenant, tables.delete_lines, file):
                pass

    async def _upload(self, context: RequestContext) -> objects.StoredFile:
        """Store the file of an upload form, and return its entry."""
        body, limits = context.body, self._limits
        parts = {part.name: part for part in read_parts(body, header_of(context.headers, b"content-type"))[0]}
        file, purpose = parts.get("file"), parts.get("purpose")
        if purpose is None or body[purpose.begin : purpose.end] != b"batch":
            raise _invalid("files are kept for batches only: the purpose should be 'batch'", "purpose")
        if file is None:
            raise _invalid("the form has no file", "file")
        content = body[file.begin : file.end]
        context.body = b""
        if content.count(b"\n") >= limits.lines_max + content.endswith(b"\n"):
            raise _invalid(f"the file has more than {limits.lines_max} lines", "file")
        name = storable(file.file_name)[:255] or "file"
        begun_s, expiry = now_s(), _expiry({name: body[part.begin : part.end] for name, part in parts.items()})
        expires_s = begun_s + expiry.seconds if expiry else 0
        stored = objects.StoredFile(objects.new_id("file-"), "batch", name, len(content), begun_s, expires_s)
        try:
            await self._store_lines(context.tenant, stored, BytesIO(content))
        except BaseException:  # even if the client went away: no incomplete file stays
            self.tasks.start(self._delete(context.tenant, stored.id))
            raise
        return stored

    async def _store_lines(self, tenant: str, file: objects.StoredFile, content: BytesIO) -> None:
        if why := await self._do(tenant, tables.begin_file, tenant, file, self._limits):
            raise _invalid(why, "file")
        rows, n = [(0, b"")], 0
        while rows:
            rows = list(enumerate(content.readlines(tables.PAGE_BYTES), n + 1))
            for n, line in rows:
                if len(line) > self._line_bytes_max:
                    raise _invalid(f"line {n} has more than {self._line_bytes_max} bytes", "file")
            await self._do(tenant, tables.add_lines, file.id, rows, is_last=not rows)

    async def _send_content(self, context: RequestContext, file: objects.StoredFile) -> None:
        """Send a file's content, as fast as the client takes it."""
        responder, may_write, last, tenant = context.responder, asyncio.Event(), 0, context.tenant
        may_write.set()
        responder.on_pause, responder.on_resume = may_write.clear, may_write.set
        fields = [(b"content-type", b"application/octet-stream"), context.id_field()]
        responder.start(200, fields, length=file.bytes)
        while context.method != "HEAD":
            after, (last, size) = last, await self._do(tenant, tables.ahead, file.id, last)
            if not size:
                break
            for begin in range(0, size, tables.PAGE_BYTES):  # a line longer than a page takes several turns
                responder.write(await self._do(tenant, tables.piece, file.id, after, last, begin))
                await may_write.wait()
        responder.end()

    async def _create_batch(self, context: RequestContext) -> dict[str, Any]:
        """Create a batch, and return it as the client sees it."""
        if len(context.body) > NEW_BATCH_BYTES_MAX:
            raise ApiError(Reason.BODY_TOO_LARGE, f"at most {NEW_BATCH_BYTES_MAX} bytes describe a batch")
        try:
            asked = msgspec.json.decode(context.body, type=objects.NewBatch)
        except objects.UNREADABLE as error:
            raise _invalid(str(error), None) from None
        fields = [(name, value) for name, value in context.headers if name in PASSED_ON]
        app = dict(reversed(fields)).get(PASSED_ON[0])
        context.principal.app(app.decode("utf-8", "replace") if app else None)
        if (await self._find_file(context.tenant, asked.input_file_id, "input_file_id")).purpose != "batch":
            raise _invalid("the purpose of the file should be 'batch'", "input_file_id")
        made, caller = objects.new_batch(asked, now_s()), objects.write_caller(context.principal, fields)
        if not await self._do(context.tenant, tables.add_batch, context.tenant, made, caller, self._limits.batches_max):
            message = f"{self._limits.batches_max} of your batches are not over, and no more may be; come back later"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=60.0)
        self._changed()
        return made


def _list_query(context: RequestContext, default: int, most: int) -> tuple[dict[str, str], int]:
    """Return the query's fields and the number of entries that it asks for."""
    asked = dict(parse_qsl(context.head.query.decode("latin-1")))
    for name, value in asked.items():
        if storable(value) != value:
            raise _invalid(f"{name[:100]} holds a character that no id has", name[:100])
    limit = asked.get("limit", str(default))
    if not limit.isdecimal() or len(limit) > len(str(most)) or not 1 <= int(limit) <= most:
        raise _invalid(f"limit should be a number from 1 to {most}", "limit")
    return asked, int(limit)


def _expiry(form: dict[str, bytes]) -> objects.Expiry | None:
    """Return the expiry that the client set for a file, or None."""
    given = {name[14:-1]: value.decode("latin-1") for name, value in form.items() if name.startswith("expires_after[")}
    try:
        return msgspec.convert(given, objects.Expiry, strict=False) if given else None
    except msgspec.ValidationError as error:
        raise _invalid(f"expires_after: {error}", "expires_after") from None


def now_s() -> int:
    """Return the time in whole seconds."""
    return int(time.time())


def _invalid(what: str, param: str | None) -> ApiError:
    return ApiError(Reason.INVALID_REQUEST, what, param=param)
