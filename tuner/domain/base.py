"""The shared temper of the domain's documents: frozen, and strict about unknown keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("there is a NUL in it, which no command line can hold")
    return text


Argument = Annotated[str, AfterValidator(_without_nul)]
"""Text that goes onto a command line."""


class Document(BaseModel):
    """A value that is read from or written to a file; immutable, unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, protected_namespaces=()
    )

    def to_json(self) -> dict[str, Any]:
        """The JSON form, under the names of the file format (`schema`, not `schema_`)."""
        return self.model_dump(mode="json", by_alias=True)
