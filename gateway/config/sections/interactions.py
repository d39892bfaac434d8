"""How are the calls that make up one answer recognised, and how far does their immunity go?"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.config.fields import checked_trace, fault
from gateway.config.section import Section
from policies.interactions import InteractionSettings

__all__ = ["InteractionRules", "InteractionsConfig"]

COUNT_MAX = 10**12
IDLE_S_MAX = 86_400
_SETTINGS = InteractionSettings()


def _checked_idle(value: Any) -> Any:
    if value == "auto" or (type(value) in (int, float) and 0 < value <= IDLE_S_MAX):
        return value
    raise fault(
        f"should be a number above 0, up to {IDLE_S_MAX}, or auto (longer after an answer that asks for a tool)"
    )


Idle = Annotated[Annotated[float, Field(gt=0, le=IDLE_S_MAX)] | Literal["auto"], BeforeValidator(_checked_idle)]
Cap = Annotated[int, Field(ge=1, le=COUNT_MAX)]


class InteractionRules(Section):
    """How the calls of one answer are recognised. None of the rules asks clients to change. fairserve only."""

    headers: bool = True
    """Clients may say it: x-fairgate-interaction, -stage and -end, or fairgate_interaction and so on in `metadata`."""
    trace: Annotated[str, AfterValidator(checked_trace)] | None = None
    """What else names an interaction: traceparent (every trace is one), or baggage:KEY (that member of `baggage`)."""
    content: bool = True
    """A tool's result goes on with the answer that asked for it, and so does a Responses call that goes on from an
    earlier one; a new turn of the user begins the next interaction, unless it follows the model's last turn at an
    agent's pace."""
    sessions: bool = True
    """Sessions, as common agents name them, keep apart conversations that look alike. A session is no interaction, but
    a call in it that follows the last answer at an agent's pace asks nothing new."""
    prefixes: bool = True
    """A raw completion whose prompt extends an earlier one goes on with it."""


class InteractionsConfig(InteractionRules):
    """The common rules, and the caps beyond which an interaction goes on without immunity."""

    idle_s: Idle = _SETTINGS.idle_s
    """An interaction that was silent for this long is over. auto: 5 minutes, and an hour after an answer that
    asks for a tool."""
    calls_max: Cap = _SETTINGS.calls_max
    """Calls of one interaction."""
    tokens_max: Cap = _SETTINGS.tokens_max
    """Tokens of one interaction, prompts and outputs."""
    lifetime_s_max: Cap = int(_SETTINGS.lifetime_s_max)
    """Time from its first call."""

    def settings(self) -> InteractionSettings:
        return InteractionSettings(self.idle_s, self.calls_max, self.tokens_max, self.lifetime_s_max)
