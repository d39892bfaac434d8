"""What is different for one kind of use, and how are the calls that make up one answer recognised?"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.config.checks import Name, checked_trace, not_empty
from gateway.config.section import Section, settings_from, with_class
from policies.interactions import InteractionSettings


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


@settings_from(InteractionSettings)
class InteractionsConfig(InteractionRules):
    """The common rules, and the caps beyond which an interaction goes on without immunity."""


def _one_or_each(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Service = Annotated[float, Field(gt=0, le=1e12)]
PerStage = Annotated[
    tuple[Service, ...],
    BeforeValidator(_one_or_each, json_schema_input_type=Service | tuple[Service, ...]),
    AfterValidator(not_empty),
]


@with_class
class AppConfig(Section):
    """What is different for one kind of use."""

    name: Name
    """The app, as keys name it in `apps`; unique."""
    interactions: InteractionRules | None = None
    """How its interactions are recognised, instead of the common rules."""
    normal_service: PerStage | None = None
    """What a call of it normally takes (alpha, beta and gamma times its input, system and output tokens), instead of
    what is learned: one number, or one for each stage; the last number holds for all later stages. fairserve only."""
