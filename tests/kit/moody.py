"""An engine whose answers break when it is told so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.gateway.capture import DONE, STREAM_END, STREAM_HEAD, Peer, Seen, Upstream, answer, chunk, token, usage_event

OK = answer(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
STREAM = STREAM_HEAD + chunk(token("a") + token("", "stop") + usage_event(1, 1) + DONE) + STREAM_END
Break = Callable[[Peer], Awaitable[None]]


async def cut(peer: Peer) -> None:
    await peer.send(STREAM_HEAD + chunk(token("a")))
    peer.writer.close()


class Moody(Upstream):
    """An engine on which the requests break that say so, or all."""

    def __init__(self, how: Break) -> None:
        super().__init__(self._answer)
        self.how = how
        self.breaks_all = False
        self.broken: list[str] = []
        """What was said in the requests that broke."""

    async def _answer(self, seen: Seen, peer: Peer) -> None:
        said = seen.json["messages"][0]["content"]
        if self.breaks_all or said.startswith("break"):
            self.broken.append(said)
            await self.how(peer)
        else:
            await peer.send(STREAM if seen.json.get("stream") else OK)
