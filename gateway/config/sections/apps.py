"""Settings of apps, and recognition of the calls that make up one answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gateway.config.checks import Name, NotEmpty
from gateway.config.section import Section, settings_from, with_class
from policies.interactions import InteractionSettings


class InteractionRules(Section):
    """Rules that recognise the calls of one answer. None asks clients to change. fairserve and wsc only."""

    headers: bool = True
    """Use the headers x-fairgate-interaction, -stage and -end."""
    content: bool = True
    """Continue an interaction by a tool result for an earlier answer, a Responses call that refers to one, or a turn of
    the user at an agent's pace."""
    sessions: bool = True
    """Use session ids of common agents: they separate conversations that look alike, and a call at an agent's pace
    continues the interaction."""
    prefixes: bool = True
    """Continue an interaction by a raw completion whose prompt extends an earlier one."""


@settings_from(InteractionSettings)
class InteractionsConfig(InteractionRules):
    """Rules that recognise interactions, when an interaction ends, and caps beyond which its calls may be throttled."""


def _as_tuple(value: Any) -> Any:
    """Return a number as a tuple of one, and a list as a tuple. Leave any other value to the check of its type."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Service = Annotated[float, Field(gt=0, le=1e12)]
PerStage = Annotated[
    tuple[Service, ...],
    BeforeValidator(_as_tuple, json_schema_input_type=Service | tuple[Service, ...]),
    NotEmpty,
]


@with_class
class AppConfig(Section):
    """Settings of one app."""

    name: Name
    """Name of the app, as keys list it in `apps`; unique."""
    interactions: InteractionRules | None = None
    """Rules for the app's interactions, in place of the common rules."""
    normal_service: PerStage | None = None
    """Normal cost of a call (alpha, beta, gamma times its input, system, output tokens), in place of the learned cost:
    one number, or one for each stage, the last for all later stages. fairserve and wsc only."""
