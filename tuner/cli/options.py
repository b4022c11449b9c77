"""Options that several commands share, written once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Engine(StrEnum):
    """What to launch."""

    auto = "auto"
    vllm = "vllm"
    sim = "sim"


MAX_SEED = 2**32 - 1
"""What NumPy's generators take."""

ProfileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROFILE", help="A profile: a path, or a name in profiles/. Default: default.", show_default=False
    ),
]
EngineOption = Annotated[
    Engine, typer.Option("--engine", help="auto takes vllm where it and an NVIDIA GPU are there, else sim.")
]
VllmOption = Annotated[
    str | None,
    typer.Option("--vllm", envvar="CHUNKTUNE_VLLM", metavar="COMMAND", help="What to run in place of `vllm`."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a profile field, such as workload.requests=100."),
]
RoundsOption = Annotated[
    int | None, typer.Option("--rounds", min=1, help="Least rounds of each setting. [profile, else 3]")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of prompts, arrivals and order.")]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where studies land.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result; warnings and errors on stderr.")]
UrlOption = Annotated[str, typer.Option("--url", metavar="URL", help="Base URL of the server, with or without /v1.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="NAME", help="Name of the environment variable that holds the API key."),
]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="ID", help="Model id. [the server's only one]")]


def api_key(variable: str | None) -> str | None:
    """The key in the named environment variable; UsageError when it is not set. The key is never shown."""
    import os

    from tuner.errors import UsageError

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageError(f"the environment variable {variable} (from --api-key-env) is not set or empty")
    if any(ord(c) < 32 or ord(c) == 127 for c in key):
        raise UsageError(
            f"the key in the environment variable {variable} holds a control character, such as a line's end",
            "Set it without, for example with $(cat FILE).",
        )
    return key
