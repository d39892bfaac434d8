"""Settings of an engine: its address and its connections."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, SecretStr, ValidationInfo, field_validator

from gateway.config.checks import backend_name, checked_api_key, checked_name, checked_url, host_name
from gateway.config.section import Section
from gateway.config.sections.tls import BackendTlsConfig

EngineKind = Literal[
    "auto", "vllm", "sglang", "llama.cpp", "tgi", "tensorrt-llm", "ollama", "lmdeploy", "max", "openai"
]


Isolation = Literal["never", "where_possible", "require"]


class BackendConfig(Section):
    """An engine that serves the models of its pool, or with `each_address` one for each address of its name."""

    url: Annotated[str, AfterValidator(checked_url)]
    """http(s)://host:port without /v1, or sim:NAME for a simulated vLLM. A path in it is put before that of every
    request."""
    each_address: bool = False
    """Make an engine, called NAME@ADDRESS, of every address behind the host name (a headless Service of Kubernetes)."""
    engine: EngineKind = "auto"
    """Kind of engine. auto: detected at the start and whenever the engine comes back; openai: any compatible server,
    judged by its answers only."""
    api_key: Annotated[SecretStr, AfterValidator(checked_api_key)] | None = None
    """Bearer token for the backend; ${NAME}: from the environment."""
    tls: BackendTlsConfig | None = None
    """TLS at an https url. Default: the system's trust, and no certificate of our own."""
    steps: bool = True
    """Read each step's report from a vLLM with fairgate's plug-in; else read its metrics."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=1_000_000)
    """Requests that the engine runs at once (vLLM's --max-num-seqs). Default: learned."""
    name: str = Field(default="", validate_default=True)
    """Name in metrics and logs; unique. Default: host:port and path of the url."""
    _address: str | None = PrivateAttr(default=None)

    @field_validator("name")
    @classmethod
    def _derived(cls, name: str, info: ValidationInfo) -> str:
        return checked_name(name) if name else backend_name(info.data.get("url"))

    @property
    def simulated(self) -> bool:
        """Return whether the backend is an engine model inside this process."""
        return self.url.startswith("sim:")

    @property
    def host(self) -> str:
        """The name whose addresses are looked up."""
        return host_name(self.url) or ""

    @property
    def address(self) -> str | None:
        """The engine's address behind the name, or None where the name is not looked up."""
        return self._address

    def at(self, address: str) -> Self:
        """Return the settings of the engine at one address behind the name."""
        copy = self.model_copy(update={"name": f"{self.name}@{address}"})
        copy._address = address
        return copy
