"""A proxy that does nothing else, on aiohttp's server and client: what a Python proxy costs if nobody counts.

python -m bench.aiohttp_proxy PORT UPSTREAM_URL
"""

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web

FORWARDED = ("content-type", "authorization")


async def run(port: int, upstream_url: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def relay(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            fields = {name: request.headers[name] for name in FORWARDED if name in request.headers}
            url = upstream_url + request.path_qs
            async with session.request(request.method, url, data=body or None, headers=fields) as upstream:
                if upstream.content_length is not None:
                    answer = await upstream.read()
                    return web.Response(status=upstream.status, body=answer, content_type=upstream.content_type)
                response = web.StreamResponse(status=upstream.status)
                response.content_type = upstream.content_type
                await response.prepare(request)
                async for piece in upstream.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        runner = web.ServerRunner(web.Server(relay, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), sys.argv[2]))
