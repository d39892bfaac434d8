"""What is different for one kind of use?"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.config.checks import Name, not_empty
from gateway.config.section import Section
from gateway.config.sections.interaction_rules import InteractionRules


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


class AppConfig(Section):
    """What is different for one kind of use."""

    name: Name
    """The app, as keys name it in `apps`; unique."""
    interactions: InteractionRules | None = None
    """How its interactions are recognised, instead of the common rules."""
    normal_service: PerStage | None = None
    """What a call of it normally takes (alpha, beta and gamma times its input, system and output tokens), instead of
    what is learned: one number, or one for each stage; the last number holds for all later stages. fairserve only."""
