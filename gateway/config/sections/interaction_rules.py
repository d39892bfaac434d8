"""How are the calls that make up one answer recognised, and how far does their immunity go?"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from gateway.config.checks import checked_trace
from gateway.config.section import Section, settings_from
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
