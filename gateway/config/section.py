"""Base of all sections of the configuration: frozen, strict, and without unknown fields.

Settings of the core are declared in the core (`policies.settings`). A section includes them by `settings_from`, and
`filled` creates the core's struct from the section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails

from gateway.config.checks import fault
from policies.settings import Setting, SettingError, settings_of

AUTO: Final = "auto"
S = TypeVar("S", bound="Section")
T = TypeVar("T")


class Section(BaseModel):
    """Base of all sections of the config: immutable, strict, and closed to unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


def field_of(setting: Setting, **more: Any) -> Any:
    """Return type and field for `create_model`. `more` replaces attributes of the field, such as its default."""
    kind: Any = Literal[setting.choices] if setting.choices else setting.kind
    bounds: dict[str, Any] = {"ge": setting.least, "gt": setting.above, "le": setting.most}
    own = {"default": setting.default, "description": setting.doc} | more
    if setting.auto:
        number = Annotated[kind, Field(**bounds)]
        kind, bounds = Annotated[number | Literal[AUTO], BeforeValidator(_number_or_auto(setting))], {}
        own["default"] = AUTO
    elif setting.default is None:
        kind |= None
    return kind, Field(**bounds, **own)


def _number_or_auto(setting: Setting) -> Callable[[Any], Any]:
    """Return a validator with a single message, where a union would give one for each member."""
    is_whole = setting.kind is int
    number = f"whole number from {setting.least}" if is_whole else f"number above {setting.above}, up to {setting.most}"
    kinds = (int,) if is_whole else (int, float)

    def checked(value: Any) -> Any:
        if value == AUTO or (type(value) in kinds and setting.allows(value)):
            return value
        raise fault(f"should be a {number}, or auto ({setting.auto})")

    return checked


def settings_from(struct: type) -> Callable[[type[S]], type[S]]:
    """Add the settings of a core struct to a section, and the check that they do not contradict each other."""

    def with_settings(section: type[S]) -> type[S]:
        def _check_consistency(made: S) -> S:
            try:
                filled(struct, made)
            except SettingError as error:
                details = InitErrorDetails(type=fault(str(error)), loc=(error.field,), input=None)
                raise ValidationError.from_exception_data(section.__name__, [details], hide_input=True) from None
            return made

        own = {name: field_of(one) for name, one in settings_of(struct).items()}
        return _extended(section, own, consistent=model_validator(mode="after")(_check_consistency))

    return with_settings


def _extended(section: type[S], fields: dict[str, Any], **checks: Any) -> type[S]:
    """Return the section with more fields and checks, under its own name."""
    return create_model(
        section.__name__, __base__=section, __doc__=section.__doc__, __module__=section.__module__,
        __validators__=checks, **fields,
    )  # fmt: skip


def with_class(section: type[S]) -> type[S]:
    """Add the field `class`, which a class body cannot name because `class` is a keyword (`is_of_batch` reads it)."""
    doc = "batch: served when other work leaves room (docs/batches.md)."
    return _extended(
        section, {"class": (Literal["interactive", "batch"], Field(default="interactive", description=doc))}
    )


def is_of_batch(section: Section) -> bool:
    """Return whether the section is of class batch."""
    return bool(getattr(section, "class") == "batch")


def filled(struct: type[T], section: Section, **more: Any) -> T:
    """Create a core struct from a section. `more` holds values from elsewhere."""
    settings = settings_of(struct)
    for field in fields(struct):  # type: ignore[arg-type]
        value = getattr(section, field.name, None)
        if field.name in settings:
            more[field.name] = field.default if value == AUTO else value
        elif isinstance(value, Section):
            more[field.name] = filled(type(field.default), value)
    return struct(**more)
