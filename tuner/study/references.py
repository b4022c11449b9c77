"""Configurations that are measured beside the candidates and never win."""

from __future__ import annotations

from tuner.domain.setting import CHUNK_KNOB, Setting, Scalar
from tuner.domain.profile import Profile


def reference_candidates(profile: Profile) -> list[tuple[str, Setting]]:
    """Label and configuration of each reference of the profile; `stock` is the baseline and not among them."""
    if "no_chunking" not in profile.references:
        return []
    knobs: dict[str, Scalar] = {"enable_chunked_prefill": False}
    length = profile.engine.args.get("max_model_len")
    if isinstance(length, int):
        # Without chunking vLLM wants the longest prompt to fit into one step.
        knobs[CHUNK_KNOB] = length
    return [("no_chunking", Setting(knobs=knobs))]
