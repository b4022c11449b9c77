"""Whether a profile makes sense: caching, blocks, lengths, and the rules between options. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.doctor.line import Line, ok, warning, wrong
from tuner.domain.profile import KnobRange, Profile
from tuner.domain.setting import CHUNK_KNOB
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload
from tuner.engine.rules import static_rule_violation
from tuner.errors import ProfileError
from tuner.space.search_space import check_alignment


def judge_profile(profile: Profile, block_size: int) -> list[Line]:
    """Every finding that needs the profile and the engine's block size, and nothing else."""
    return [
        _rules(profile),
        _caching(profile),
        _chunks(profile, block_size),
        *_prefixes(profile, block_size),
        *_lengths(profile),
        _seqs(profile),
    ]


def _rules(profile: Profile) -> Line:
    violation = static_rule_violation(profile.engine.args)
    if violation is None:
        return ok("options", "the options of engine.args go together")
    return wrong("options", violation.message, violation.hint)


def _caching(profile: Profile) -> Line:
    if profile.engine.args.get("enable_prefix_caching") is False:
        return wrong(
            "prefix caching",
            "engine.args.enable_prefix_caching is false: every prompt is computed anew and nothing is reused",
            "Take that line out (vLLM caches prefixes by default) or set it to true.",
        )
    return ok("prefix caching", "the profile leaves prefix caching on; --url tells whether a server really has it on")


def chunk_sizes(profile: Profile) -> list[int]:
    """The chunk sizes that the space names; the ends of a range."""
    spec = profile.space.knobs.get(CHUNK_KNOB)
    if isinstance(spec, KnobRange):
        return [round(spec.low), round(spec.high)]
    return [v for v in spec or [] if isinstance(v, int) and not isinstance(v, bool)]


def _chunks(profile: Profile, block_size: int) -> Line:
    for chunk in chunk_sizes(profile):
        try:
            check_alignment(chunk, block_size)
        except ProfileError as error:
            return wrong("block size", error.message, error.hint)
    return ok("block size", f"every chunk size is a whole number of KV blocks of {block_size} tokens")


def _shared(profile: Profile) -> Iterable[tuple[str, int, int]]:
    """Where it stands, shortest shared prefix, shortest text behind it."""
    load = profile.workload
    if isinstance(load, SharedPrefixWorkload):
        yield "workload", load.system_prompt_tokens[0], load.user_prompt_tokens[0]
    if isinstance(load, MixedWorkload):
        for one in load.classes:
            if one.system_prompt_tokens[1] > 0:
                yield f"workload.classes.{one.name}", one.system_prompt_tokens[0], one.user_prompt_tokens[0]


def _prefixes(profile: Profile, block_size: int) -> list[Line]:
    return [judge_prefix(where, prefix, own, block_size) for where, prefix, own in _shared(profile)]


def judge_prefix(where: str, prefix: int, own: int, block_size: int) -> Line:
    """How much of a shared prefix can be reused at all. `own` is the shortest text behind it."""
    check = "prefix length"
    reusable = prefix // block_size
    if prefix and own == 0 and prefix % block_size == 0:
        # The last token of a prompt is always computed, so its block is never taken from the cache.
        reusable -= 1
        if reusable > 0:
            return warning(
                check,
                f"{where}: prompts may end with the shared prefix of {prefix} tokens, a whole number of blocks: one "
                f"block of {block_size} fewer is reused than expected",
                "Ask for at least one user prompt token (user_prompt_tokens: [1, ...]).",
            )
    if reusable <= 0:
        return wrong(
            check,
            f"{where}: a shared prefix of {prefix} tokens fills no KV block of {block_size}: the hit rate is 0",
            f"Share at least {block_size} tokens (system_prompt_tokens), or lower engine.args.block_size.",
        )
    rest = prefix - reusable * block_size
    return ok(
        check,
        f"{where}: of a shared prefix of {prefix} tokens {reusable} blocks of {block_size} can be reused"
        + (f", the last {rest} tokens are computed each time" if rest else ""),
    )


def _lengths(profile: Profile) -> list[Line]:
    limit = profile.engine.args.get("max_model_len")
    load = profile.workload
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        return []
    longest = 0
    if isinstance(load, SharedPrefixWorkload):
        longest = load.system_prompt_tokens[1] + load.user_prompt_tokens[1] + load.output_tokens[1]
    if isinstance(load, MixedWorkload):
        longest = max(c.system_prompt_tokens[1] + c.user_prompt_tokens[1] + c.output_tokens[1] for c in load.classes)
    if longest > limit:
        return [
            wrong(
                "model length",
                f"the longest request takes {longest} tokens, engine.args.max_model_len is {limit}: it is refused",
                "Raise max_model_len or shorten the workload.",
            )
        ]
    return [ok("model length", f"the longest request takes {longest} of {limit} tokens")] if longest else []


def _seqs(profile: Profile) -> Line:
    seqs = profile.engine.args.get("max_num_seqs")
    if seqs is None and chunk_sizes(profile):
        return warning(
            "max_num_seqs",
            "engine.args.max_num_seqs is open: vLLM lowers it to the chunk size, so a sweep varies two things",
            "Pin it, for example max_num_seqs: 128.",
        )
    peak = profile.workload.peak_concurrency
    if isinstance(seqs, int) and not isinstance(seqs, bool) and seqs < peak:
        return warning(
            "max_num_seqs",
            f"max_num_seqs is {seqs}, the load keeps {peak} requests in flight: {peak - seqs} always wait",
            f"Raise engine.args.max_num_seqs to {peak} or more, unless that queue is what you want to measure.",
        )
    return ok("max_num_seqs", "pinned" if seqs is not None else "no chunk sizes in the space")
