"""Sentences about a measurement that a reader needs before trusting it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tuner.domain.measurement import Latency, Measurement
from tuner.domain.observation import RequestRecord
from tuner.domain.units import counted
from tuner.measure.percentiles import QUANTILES, least_sample


def sample_warning(latencies: Mapping[str, Latency | None], what: str = "") -> str | None:
    """Which percentiles rest on too few values: with n under 1/(1 - q) they are the maximum, no more."""
    short = []
    for statistic, q in QUANTILES.items():
        few = [f"{name} ({found.n})" for name, found in latencies.items() if found and found.n < least_sample(q)]
        if few:
            short.append(f"{statistic.upper()} of {', '.join(few)} rests on fewer than {least_sample(q)} values")
    if not short:
        return None
    return f"{'; '.join(short)}{what}: ask for more requests before trusting it"


def deltas_warning(records: Sequence[RequestRecord]) -> str | None:
    """A server that sends several tokens at a time, or one in pieces: the time between deltas is not per token."""
    good = [r for r in records if r.ok and r.output_tokens]
    tokens, deltas = sum(r.output_tokens or 0 for r in good), sum(r.deltas for r in good)
    if not deltas or deltas / 1.1 < tokens < 1.1 * deltas:
        return None
    how = (
        f"{tokens / deltas:.1f} tokens arrive in one piece"
        if tokens > deltas
        else f"a token has {deltas / tokens:.1f} pieces"
    )
    return f"{how} on average: itl_ms is the time between pieces, see tpot_ms"


def failures_note(records: Sequence[RequestRecord]) -> str | None:
    """How many requests failed, of which kinds, and what the first of them said."""
    failed = [r for r in records if not r.ok]
    if not failed:
        return None
    kinds = Counter(r.error_code or "unknown" for r in failed)
    listed = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    return f"{len(failed)} of {counted(len(records), 'request')} failed ({listed}); the first: {failed[0].error}"


def collected_note(records: Sequence[RequestRecord]) -> str | None:
    """Answers that arrived in one piece, of a round in which there are few enough of them to measure the others."""
    held = sum(r.collected for r in records if r.ok)
    if not held:
        return None
    return (
        f"{held} of {counted(len(records), 'answer')} arrived in one piece, or in few: their TTFT is the time of that "
        "piece, and itl_ms and tpot_ms are without them"
    )


def prompts_note(records: Sequence[RequestRecord]) -> str | None:
    """Prompts of another length than planned, of rounds that count with them: few, or not required to be exact."""
    known = [
        (r.prompt_tokens, r.prompt_tokens_planned)
        for r in records
        if r.ok and r.prompt_tokens is not None and r.prompt_tokens_planned is not None
    ]
    # The tokens at a prompt's ends are counted differently by different servers.
    other = [(given, planned) for given, planned in known if abs(given - planned) > 2]
    if not other:
        return None
    given, planned = (sum(column) / len(other) for column in zip(*other, strict=True))
    return (
        f"{len(other)} of {counted(len(known), 'prompt')} were not as long as planned: {given:.0f} tokens on average "
        f"by the server's count, {planned:.0f} planned"
    )


def answers_note(records: Sequence[RequestRecord]) -> str | None:
    """Answers of another length than asked for, of rounds that count with them: few, or not required to be exact."""
    asked = [r for r in records if r.ok and r.output_tokens_planned is not None]
    known = [r for r in asked if r.output_tokens is not None]
    if asked and not known:
        return "whether answers were as long as asked is not known: the server's usage does not give output tokens"
    other = sum(r.output_tokens != r.output_tokens_planned for r in known)
    if not other:
        return None
    given = sum(r.output_tokens or 0 for r in known) / len(known)
    planned = sum(r.output_tokens_planned or 0 for r in known) / len(known)
    return (
        f"{other} of {len(known)} answers were not as long as asked: {given:.1f} output tokens on average, "
        f"{planned:.1f} asked for"
    )


def cacheable_tokens(prefix_tokens: int, prompt_tokens: int, block_size: int) -> int:
    """How much of a shared prefix can be found cached, in tokens.

    Only whole blocks are reused, and the last token of a prompt is always computed: a prompt that is
    cached to its end and a multiple of the block loses its last block.
    """
    return min(prefix_tokens, max(0, prompt_tokens - 1)) // block_size * block_size


def prefix_note(prefix_tokens: int, prompt_tokens: int, block_size: int) -> str | None:
    """Why fewer tokens are found cached than the prefix has; None when nothing is out of the ordinary."""
    if prefix_tokens <= 0:
        return None
    found = cacheable_tokens(prefix_tokens, prompt_tokens, block_size)
    if prefix_tokens < block_size:
        return (
            f"the shared prefix ({prefix_tokens} tokens) is shorter than one KV block ({block_size} tokens): "
            "only whole blocks are reused, so a hit rate of 0 is what to expect"
        )
    if prefix_tokens >= prompt_tokens and prompt_tokens % block_size == 0:
        return (
            f"the whole prompt ({prompt_tokens} tokens) is shared and an exact multiple of the KV block "
            f"({block_size} tokens): its last block is always computed again, so at most {found} tokens are reused"
        )
    if found == 0:
        return f"no whole KV block ({block_size} tokens) of the shared prefix can be reused: expect a hit rate of 0"
    return None


def no_hits_note(prompt_tokens: Sequence[int], block_size: int) -> str:
    """What a hit rate of 0 may come from, when no shared prefix is known."""
    longest = max(prompt_tokens, default=0)
    if 0 < longest <= block_size:
        return (
            f"nothing was found cached: the longest prompt ({longest} tokens) does not exceed one KV block "
            f"({block_size} tokens), and only whole blocks are reused"
        )
    return (
        f"nothing was found cached: a shared prefix under one KV block ({block_size} tokens) is never reused; "
        "if it is longer, see whether enable_prefix_caching is on"
    )


def memory_note(settings: Sequence[Measurement], tolerance: float = 0.01) -> str | None:
    """Says so when device memory does not tell these settings apart; None when it does, or for fewer than two.

    vLLM preallocates its KV pool up to gpu_memory_utilization, whatever the chunk size. `tolerance` is
    the spread, relative to the largest peak, that counts as alike.
    """
    peaks = [m.memory.peak_bytes for m in settings if m.memory.source == "nvml" and m.memory.peak_bytes]
    if len(peaks) < 2:
        return None
    for device in sorted(set().union(*peaks)):
        seen = [p[device] for p in peaks if device in p]
        if max(seen) - min(seen) > tolerance * max(seen):
            return None
    return (
        f"device memory is not discriminating: the NVML peaks of these {len(peaks)} settings lie within "
        f"{tolerance * 100:.0f} %, because vLLM preallocates its KV pool up to gpu_memory_utilization. Compare the "
        "activation peak, the KV pool and the KV in use instead."
    )
