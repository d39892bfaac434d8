"""Tokens of issuers, made by PyJWT and by keys that are served as an issuer serves them, in the place of API keys."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any, cast

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from jwt.utils import base64url_decode, base64url_encode

from gateway.config.model import TenantConfig
from gateway.config.sections.keys import IssuerConfig
from gateway.http.errors import ApiError
from gateway.keys import issuers
from gateway.keys.identity import Keyring
from tests.gateway.capture import Upstream, replies
from tests.gateway.live import CHAT, Answer, Live, Starter, chat
from tests.kit.held import Held, one_at_a_time
from tests.kit.usage import OK
from tests.waiting import until

TENANTS = [{"name": "physics", "weight": 3.0}, {"name": "chemistry"}]
RSA_KEYS = [rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2)]
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def jwk(private: Any, kid: str, **more: Any) -> dict[str, Any]:
    kind: Any = RSAAlgorithm if isinstance(private, rsa.RSAPrivateKey) else ECAlgorithm
    return {**kind.to_jwk(private.public_key(), as_dict=True), "kid": kid, **more}


class Issuer:
    """Serves its keys and what OpenID Connect says of them, and signs tokens."""

    def __init__(self) -> None:
        self.url = ""
        self.keys = [jwk(RSA_KEYS[0], "first")]
        self.status = 200
        self.reads = 0

    async def discovery(self, _: web.Request) -> web.Response:
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def jwks(self, _: web.Request) -> web.Response:
        self.reads += 1
        return web.json_response({"keys": self.keys}, status=self.status)

    def token(self, private: Any = RSA_KEYS[0], kid: str | None = "first", alg: str = "RS256", **claims: Any) -> str:
        now = int(time.time())
        known = {"iss": self.url, "aud": "fairgate", "exp": now + 600, "tenant": "physics", "sub": "ada"}
        known |= claims
        kept = {name: value for name, value in known.items() if value is not None}
        return jwt.encode(kept, private, algorithm=alg, headers=None if kid is None else {"kid": kid})

    def config(self, **more: Any) -> list[dict[str, Any]]:
        return [{"issuer": self.url, "audience": "fairgate", **more}]


@asynccontextmanager
async def issuer_running() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    app = web.Application()
    app.add_routes([web.get("/.well-known/openid-configuration", issuer.discovery), web.get("/keys", issuer.jwks)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(
    start: Starter, tenants: Any = TENANTS, groups: Any = (), **more: Any
) -> AsyncIterator[tuple[Live, Issuer, Upstream]]:
    """A gateway that takes tokens of an issuer, and has read its keys."""
    async with issuer_running() as issuer, Upstream(replies(OK)) as upstream:
        async with start(upstream.url, tenants=tenants, groups=groups, jwt=issuer.config(**more)) as live:
            await until(lambda: issuer.reads > 0)
            await until_taken(live, issuer.token(orgs=["south"]))
            yield live, issuer, upstream


async def until_taken(live: Live, token: str) -> None:
    """The gateway answers 503 as long as it has not read the keys."""
    while (got := await live.ask(CHAT, chat(), key=token)).status == 503:
        assert got.error["code"] == "issuer_unavailable"
        assert got.headers["retry-after"] == "1"
    assert got.status == 200


async def status(live: Live, token: str, **fields: str) -> int:
    return (await live.ask(CHAT, chat(), key=token, **fields)).status


async def logged(live: Live, got: Answer) -> dict[str, Any]:
    """The line of this request in the access log."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        lines = [json.loads(line) for line in live.log.read_text().splitlines()]
        found[:] = [line for line in lines if line["request_id"] == got.headers["x-request-id"]]
        return bool(found)

    await until(is_there)
    return found[0]


def refused(got: Answer, code: str = "invalid_api_key") -> str:
    assert (got.status, got.error["code"]) == (401, code)
    message: str = got.error["message"]
    return message


async def test_a_token_names_tenant_user_and_app(start: Starter) -> None:
    async with serving(start, app_claim="apps") as (live, issuer, _):
        token = issuer.token(tenant=["unknown", "chemistry"], sub="ada", apps=["no name", "search", "x" * 200, "chat"])
        line = await logged(live, await live.ask(CHAT, chat(user="somebody else"), key=token, x_fairgate_user="third"))
        assert (line["tenant"], line["weight"], line["app"]) == ("chemistry", 1.0, "search")
        other = await logged(live, await live.ask(CHAT, chat(), key=token, x_fairgate_app="chat"))
        assert (other["app"], other["user"]) == ("chat", line["user"]), "the token says who asks, not the request"
        assert await status(live, token, x_fairgate_app="admin") == 403
        bob = await logged(live, await live.ask(CHAT, chat(), key=issuer.token(sub="bob")))
        assert (bob["tenant"], bob["weight"], bob["app"]) == ("physics", 3.0, "default")
        assert bob["user"] != line["user"]


async def test_a_token_that_says_something_else_is_refused(start: Starter) -> None:
    async with serving(start) as (live, issuer, upstream):
        taken = len(upstream.requests)
        for claims, why in [
            ({"aud": "another service"}, "Audience"),
            ({"aud": None}, "aud"),
            ({"exp": None}, "exp"),
            ({"iss": "http://127.0.0.1:1"}, "issuer"),
            ({"iss": None}, "issuer"),
            ({"nbf": time.time() + 7200}, "not yet valid"),
            ({"tenant": "biology"}, "names no tenant"),
            ({"tenant": None}, "names no tenant"),
            ({"tenant": {"name": "physics"}}, "names no tenant"),
        ]:
            assert why in refused(await live.ask(CHAT, chat(), key=issuer.token(**claims))), claims
        assert len(upstream.requests) == taken
        for exp in [int("9" * 400), int("9" * 4000), 1e308, float("inf"), float("nan")]:  # no clock has such an end
            assert await status(live, issuer.token(exp=exp)) in (200, 401), exp


async def test_a_token_is_taken_until_it_expires(start: Starter) -> None:
    async with serving(start, leeway_s=0) as (live, issuer, _):
        message = refused(await live.ask(CHAT, chat(), key=issuer.token(exp=int(time.time()) - 1)), "expired_api_key")
        assert "its issuer" in message
        token = issuer.token(exp=int(time.time()) + 2)
        while (got := await live.ask(CHAT, chat(), key=token)).status == 200:
            pass
        assert "ask its issuer for a new one" in refused(got, "expired_api_key")
    async with serving(start, leeway_s=600) as (live, issuer, _):
        assert await status(live, issuer.token(exp=int(time.time()) - 100)) == 200


async def test_only_the_algorithms_of_the_config_and_one_spelling_are_taken(start: Starter) -> None:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    async with serving(start) as (live, issuer, _):
        claims = {"iss": issuer.url, "aud": "fairgate", "exp": time.time() + 60, "tenant": "physics"}
        public = str(issuer.keys[0]["n"])  # the classic: a public key taken for a shared secret
        token = issuer.token()
        assert len(token.rpartition(".")[2]) % 4, "the last letter has bits that say nothing"
        for other in (
            jwt.encode(claims, None, "none"),
            issuer.token(public, alg="HS256"),
            issuer.token(alg="RS512"),
            issuer.token(RSA_KEYS[1]),
            token[:-8] + "AAAAAAAA",
            token.rpartition(".")[0],
            "eyJ",
            "eyJ" + "." * 1000,
            token[:-1] + letters[letters.index(token[-1]) ^ 1],
            token + "=",
            token + "==",
            token.replace(".", "=.", 1),
        ):
            refused(await live.ask(CHAT, chat(), key=other))
        assert await status(live, token) == 200


async def test_an_issuer_changes_its_keys(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new key is read soon after a token has named it; the keys before stay known while the issuer is away."""
    monkeypatch.setattr(issuers, "REFRESH_S_MIN", 0.0)
    async with serving(start) as (live, issuer, _):
        issuer.keys.append(jwk(EC_KEY, "second", use="sig", alg="ES256"))
        fresh = issuer.token(EC_KEY, "second", "ES256")
        while (got := await live.ask(CHAT, chat(), key=fresh)).status != 200:
            assert got.error["code"] == "issuer_unavailable"
        issuer.status = 500
        assert await status(live, issuer.token(kid="third")) == 503
        await until(lambda: any("answers 500" in fault for fault in live.gateway.faults()))
        assert await status(live, issuer.token(sub="eve")) == 200
        issuer.status = 200
        await until(lambda: not live.gateway.faults())


async def test_keys_are_read_no_more_often_than_is_decent_and_guesses_count_as_wrong_keys(start: Starter) -> None:
    async with serving(start) as (live, issuer, _):
        reads, token = issuer.reads, issuer.token(sub="new")
        assert await status(live, issuer.token(kid=None)) == 200, "there is one key: no id is needed"
        for n in range(15):
            assert "none of the keys" in refused(await live.ask(CHAT, chat(), key=issuer.token(kid=f"invented {n}")))
        assert issuer.reads == reads
        assert [await status(live, issuer.token(RSA_KEYS[1], sub=str(n))) for n in range(6)] == [401] * 5 + [429]
        assert await status(live, token) == 429, "no token is checked for who guesses"


GROUPS = [{"name": "north"}, {"name": "labs", "group": "north"}, {"name": "south"}]
GROUPED = [{"name": "physics", "group": "south"}, {"name": "chemistry", "group": "labs"}, {"name": "biology"}]


async def test_a_token_names_only_tenants_in_the_groups_that_it_names(start: Starter) -> None:
    async with serving(start, GROUPED, GROUPS, group_claim="orgs") as (live, issuer, _):

        async def tenant_of(orgs: Any, *tenants: str) -> str:
            got = await live.ask(CHAT, chat(), key=issuer.token(tenant=[*tenants], orgs=orgs))
            if got.status == 401:
                assert "names no tenant of this gateway in a group that its claim 'orgs' names" in refused(got)
                return ""
            return str((await logged(live, got))["tenant"])

        assert await tenant_of("south", "physics") == "physics"
        assert await tenant_of("north", "physics", "biology", "chemistry") == "chemistry", "further up"
        assert await tenant_of(["nowhere", "south", 7], "nobody", "chemistry", "physics") == "physics"
        for orgs in ("labs", "nowhere", None, [], {"south": 1}, "sout"):
            assert await tenant_of(orgs, "physics", "biology") == ""


async def test_a_reload_that_moves_or_takes_away_a_tenant_counts_for_tokens_that_were_taken(start: Starter) -> None:
    engine = Held()
    async with issuer_running() as issuer, Upstream(engine) as upstream:
        pools = one_at_a_time(upstream.url)
        fields: dict[str, Any] = {"tenants": GROUPED, "groups": GROUPS, "jwt": issuer.config(group_claim="orgs")}
        async with start(pools=pools, **fields) as live:
            token, config = issuer.token(orgs=["south"]), live.gateway.config
            await until(lambda: issuer.reads > 0)
            engine.may.set()
            await until_taken(live, token)
            engine.may.clear()
            runs = asyncio.create_task(live.ask(CHAT, chat(), key=token))
            await until(lambda: len(upstream.requests) == 2)
            waits = asyncio.create_task(live.ask(CHAT, chat(), key=token))
            await until(lambda: live.engine.queued == 1)
            physics = config.tenants[0].model_copy(update={"group": "north"})
            await live.gateway.take_over(config.model_copy(update={"tenants": (physics, *config.tenants[1:])}))
            engine.may.set()
            assert ((await waits).status, (await runs).status) == (401, 200)
            assert "in a group" in refused(await live.ask(CHAT, chat(), key=token))
            token = issuer.token(orgs=["north"])
            assert await status(live, token) == 200
            await live.gateway.take_over(config.model_copy(update={"tenants": config.tenants[1:]}))
            assert "names no tenant" in refused(await live.ask(CHAT, chat(), key=token))
            assert await status(live, issuer.token(tenant="chemistry", orgs=["labs"])) == 200


async def test_rsa_keys_that_can_be_broken_are_none(start: Starter) -> None:
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    async with issuer_running() as issuer, Upstream(replies(OK)) as upstream:
        issuer.keys = [jwk(weak, "weak"), jwk(RSA_KEYS[0], "first")]
        async with start(upstream.url, tenants=TENANTS, jwt=issuer.config()) as live:
            await until_taken(live, issuer.token())
            with pytest.warns(jwt.InsecureKeyLengthWarning):
                token = issuer.token(weak, "weak")
            assert "minimum recommended size of 2048 bits" in refused(await live.ask(CHAT, chat(), key=token))


@pytest.mark.parametrize("is_known", [False, True])
def test_the_other_spelling_of_an_ecdsa_signature_is_taken_back_with_the_token(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ec.SECP256R1().group_order
    ours = issuers.Issuer(IssuerConfig(issuer="http://issuer", audience="fairgate"))
    monkeypatch.setattr(ours, "_keys", {"second": jwt.PyJWK(jwk(EC_KEY, "second", alg="ES256"))})
    tokens = issuers.Issuers([], cast("Any", None), cast("Any", None))
    monkeypatch.setattr(tokens, "_by_name", {"http://issuer": ours})
    keyring = Keyring([TenantConfig(name="physics")], open_access=False)
    keyring.tokens = tokens
    issuer = Issuer()
    issuer.url = "http://issuer"
    token = issuer.token(EC_KEY, "second", "ES256")
    head, _, signature = token.rpartition(".")
    raw = base64url_decode(signature)
    twin = f"{head}.{base64url_encode(raw[:32] + (order - int.from_bytes(raw[32:])).to_bytes(32)).decode()}"
    ask = partial(keyring.principal, address="127.0.0.1", unix_s=time.time())
    taken = [ask(each.encode()) for each in ((token, twin) if is_known else ())]
    keyring.learn({}, {sha256(token.encode()).digest()})
    for each in (twin, token):
        with pytest.raises(ApiError):
            ask(each.encode())
    assert [keyring.takes(each) for each in taken] == [False] * len(taken)
