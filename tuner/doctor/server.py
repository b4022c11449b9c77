"""A server that runs already: whether it can be measured, and what would make its numbers lie."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.clock import Clock
from tuner.doctor.line import Line, ok, warning, wrong
from tuner.doctor.sense import judge_prefix
from tuner.doctor.stream import ask_stream, judge_stream
from tuner.doctor.surroundings import PROXIES
from tuner.domain.observation import CounterDelta
from tuner.domain.profile import Profile
from tuner.domain.workload import SharedPrefixWorkload
from tuner.errors import LoadError
from tuner.load.http import Questions, as_object
from tuner.load.probe import ServerFacts, probe
from tuner.load.reply import whole
from tuner.load.target import Target
from tuner.load.vocabulary import tokenize
from tuner.measure.counted import others_use_it
from tuner.telemetry import Snapshot, Unknown, cache_info, metrics_span

DEFAULT_BLOCK = 16
_PROBES = 9
_ASK_TIMEOUT_S = 30.0
_UNSTEADY = 2.0
"""Slowest but one against the median of equal requests, one at a time."""
_ORDER = "In this order: is prefix caching on, do prefix and block size match, is there memory for the cache."
_AUTH_MEND = (
    "Check the API key (--api-key-env NAME), the base URL (with or without /v1, as the server has it) and the "
    "model id (--model ID): gateways answer 401 to each of these."
)


async def judge_server(target: Target, profile: Profile, clock: Clock, env: Mapping[str, str]) -> list[Line]:
    """Every finding about one server; the first that makes the others pointless ends the list."""
    ignore_eos = profile.workload.ignore_eos
    try:
        facts = await probe(target, ignore_eos=ignore_eos)
    except LoadError as error:
        return [explain(error, target, env)]
    what = " (chunktune's simulated engine)" if facts.simulated else ""
    lines = [ok("server", f"{target.base} serves {facts.model!r}{what}"), *_facts(facts)]
    async with (
        metrics_span(target.base, clock, headers=target.headers) as span,
        Questions(target, _ASK_TIMEOUT_S) as questions,
    ):
        metrics = span.before
        kv_tokens, block_size = cache_info(metrics) if isinstance(metrics, Snapshot) else (None, None)
        info = await _server_info(questions)
        times_ms, cached, length = await _again_and_again(questions, facts, clock, block_size or DEFAULT_BLOCK)
        streamed = await ask_stream(target, facts, clock, ignore_eos=ignore_eos)
    lines += judge_stream(streamed, ignore_eos=ignore_eos)
    lines += judge_metrics(metrics) if isinstance(metrics, Snapshot) else [_no_metrics(metrics)]
    whole_answers = len(times_ms) + 1 if times_ms else 0
    lines += judge_counters(span.delta, sent=_PROBES + 1, answered=whole_answers + streamed.ok)
    caching = judge_caching(cached, length, facts.reports_cached_tokens, _says_caching(info, metrics))
    alignment = _alignment(profile, block_size)
    memory = judge_pool(kv_tokens, needed_tokens(profile))
    return [*lines, caching, *alignment, memory, judge_jitter(times_ms, [caching, *alignment, memory])]


def _no_metrics(metrics: Unknown) -> Line:
    return warning(
        "metrics",
        f"{metrics.reason}: hit rate, engine steps and preemptions will not be measured",
        "Let /metrics through (it is beside /v1, not below it).",
    )


def judge_counters(counters: CounterDelta, *, sent: int, answered: int) -> list[Line]:
    """Whether the server's counters are about our requests: of so many sent, at least so many answered. Pure."""
    if counters.requests_finished is None:
        return []
    others = others_use_it(counters, sent=sent, answered=answered, most=sent)
    if not others:
        return [ok("counters", f"the server counted the {sent} requests that were sent, and no others")]
    return [
        warning(
            "counters", others, "Measure while nobody else does, and one server rather than several behind one address."
        )
    ]


def explain(error: LoadError, target: Target, env: Mapping[str, str]) -> Line:
    """The line for a server that cannot be used."""
    if error.code == "auth":
        return wrong("auth", error.message, _AUTH_MEND)
    left_over = [name for name in (*PROXIES, *(p.lower() for p in PROXIES)) if env.get(name)]
    if error.code in ("refused", "timeout"):
        hint = error.hint
        if left_over and not target.loopback:
            hint = (
                f"{', '.join(left_over)} set: the request went to that proxy. Unset them, or add the host to NO_PROXY."
            )
        elif left_over:
            hint += f" ({', '.join(left_over)} set, and ignored for this address.)"
        return wrong("connection", error.message, hint)
    if error.code == "missing_model":
        return wrong("model id", error.message, error.hint)
    if error.code == "no_chat_template":
        return wrong("chat template", error.message, error.hint)
    if error.code == "http_error":
        return wrong("first request", error.message, error.hint)
    return wrong(
        "base URL",
        error.message,
        f"{error.hint} Check the base URL: the server's /v1/models has to be there, with or without /v1 in --url.",
    )


def _facts(facts: ServerFacts) -> list[Line]:
    lines = []
    if facts.label:
        lines.append(
            warning("chat template", facts.label, "Give the server --chat-template, or set workload.api: completions.")
        )
    if facts.api == "completions" and not facts.token_ids:
        lines.append(
            warning(
                "token ids",
                "the server takes no token ids as a prompt: prompt lengths are estimates",
                "Measure vLLM itself rather than a gateway in front of it.",
            )
        )
    if not facts.reports_cached_tokens:
        lines.append(
            warning(
                "cached tokens",
                "`usage` does not tell cached tokens: a round cannot prove that it began cold",
                "Start the server with --enable-prompt-tokens-details.",
            )
        )
    return lines


def judge_metrics(metrics: Snapshot) -> list[Line]:
    """Other load on the server, and preemptions that it had. Pure."""
    lines = [ok("metrics", "readable")]
    running = metrics.total("vllm:num_requests_running")
    if running:
        lines.append(
            warning("other load", f"{running:g} requests run there now: not yours", "Measure while nobody else does.")
        )
    preemptions = metrics.total("vllm:num_preemptions_total")
    if preemptions:
        lines.append(
            warning(
                "preemptions",
                f"{preemptions:g} since its start: requests were thrown out for want of KV memory",
                "Lower max_num_seqs or max_num_batched_tokens, or give the cache more memory.",
            )
        )
    return lines


async def _server_info(questions: Questions) -> Mapping[str, Any]:
    try:
        status, body = await questions.ask("GET", "/server_info?config_format=json")
    except LoadError:
        return {}
    info = as_object(body) if status == 200 else None
    config = None if info is None else info.get("vllm_config")
    return config if isinstance(config, dict) else {}


def _says_caching(info: Mapping[str, Any], metrics: Snapshot | Unknown) -> bool | None:
    section = info.get("cache_config")
    if isinstance(section, Mapping) and isinstance(section.get("enable_prefix_caching"), bool):
        return bool(section["enable_prefix_caching"])
    if isinstance(metrics, Snapshot):
        for labels in metrics.series.get("vllm:cache_config_info", {}):
            value = dict(labels).get("enable_prefix_caching")
            if value in ("True", "False"):
                return value == "True"
    return None


async def _again_and_again(
    questions: Questions, facts: ServerFacts, clock: Clock, block_size: int
) -> tuple[list[float], int | None, int]:
    """One new prompt, sent several times: times after the first, what the second found cached, its length."""
    text = f"{secrets.token_hex(8)} " + " ".join(f"{secrets.token_hex(2)}" for _ in range(block_size * 4))
    ids = await tokenize(questions, {"model": facts.model, "prompt": text, "add_special_tokens": False})
    usable = ids is not None and facts.token_ids
    prompt: Any = ids[: block_size * 4 + 1] if ids is not None and usable else text
    body: dict[str, Any] = {"model": facts.model, "max_tokens": 1, "temperature": 0}
    path = "/v1/completions"
    if facts.api == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = prompt
    times_ms: list[float] = []
    cached: int | None = None
    length = 0
    for number in range(_PROBES):
        sent_s = clock.monotonic_s()
        try:
            status, reply = await questions.ask("POST", path, body)
        except LoadError:
            break
        answer = as_object(reply) if status == 200 else None
        if answer is None or not answer.get("choices"):
            break
        if number:
            times_ms.append((clock.monotonic_s() - sent_s) * 1e3)
        usage = _mapping(answer.get("usage"))
        length = whole(usage.get("prompt_tokens"), length) or length
        if number == 1:
            cached = whole(_mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    return times_ms, cached, length


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def judge_caching(cached: int | None, length: int, reported: bool, says: bool | None) -> Line:
    """Whether prefix caching is really on: by a prompt sent twice, else by the server's word. Pure."""
    check = "prefix caching"
    hint = "Start the server with --enable-prefix-caching (and not with --no-enable-prefix-caching)."
    if says is False:
        return wrong(check, "the server runs with prefix caching off", hint)
    if cached:
        return ok(check, f"really on: a prompt of {length} tokens, sent again, found {cached} of them cached")
    if reported and cached == 0:
        return wrong(check, f"a prompt of {length} tokens, sent again, found none of them cached", hint)
    if says:
        return ok(check, "on, by the server's own word")
    return warning(check, "cannot be told: the server reports neither cached tokens nor its configuration", hint)


def _alignment(profile: Profile, block_size: int | None) -> list[Line]:
    load = profile.workload
    if not isinstance(load, SharedPrefixWorkload):
        return []
    line = judge_prefix(
        "workload", load.system_prompt_tokens[0], load.user_prompt_tokens[0], block_size or DEFAULT_BLOCK
    )
    if block_size is None:
        line = Line(
            line.check, line.status, f"{line.message} (block size not known, {DEFAULT_BLOCK} assumed)", line.hint
        )
    return [line]


def needed_tokens(profile: Profile) -> int | None:
    """KV tokens that the load holds at its peak with everything shared that can be; None where it cannot be told."""
    load = profile.workload
    if not isinstance(load, SharedPrefixWorkload):
        return None
    own = load.user_prompt_tokens[1] + load.output_tokens[1]
    return load.system_prompts * load.system_prompt_tokens[1] + load.peak_concurrency * own


def judge_pool(kv_tokens: int | None, needed: int | None) -> Line:
    """Whether the KV pool holds the load. Pure."""
    check = "memory for the cache"
    if kv_tokens is None:
        return warning(
            check, "the server does not tell the size of its KV pool", "Look for 'KV cache size' in its log."
        )
    if needed is None:
        return ok(check, f"the KV pool holds {kv_tokens:,} tokens")
    if kv_tokens < needed:
        return wrong(
            check,
            f"the KV pool holds {kv_tokens:,} tokens, the load needs {needed:,} at its peak: prefixes are evicted",
            "Give the cache more memory (gpu_memory_utilization, smaller max_num_batched_tokens), or lower the load.",
        )
    return ok(check, f"the KV pool holds {kv_tokens:,} tokens, the load needs {needed:,} at its peak")


def judge_jitter(times_ms: Sequence[float], causes: Sequence[Line]) -> Line:
    """Whether equal requests, one at a time, take equally long; if not, where to look first. Pure."""
    if len(times_ms) < _PROBES - 1:
        return wrong(
            "jitter",
            f"only {len(times_ms)} of {_PROBES - 1} equal requests were answered as they should",
            "See the server's log.",
        )
    ordered = sorted(times_ms)
    median, high = ordered[len(ordered) // 2], ordered[-2]
    text = f"equal requests, one at a time: median {median:.1f} ms, second slowest {high:.1f} ms"
    if high <= _UNSTEADY * median or high - median < 5.0:
        return ok("jitter", text)
    suspect = next((line for line in causes if line.status != "ok"), None)
    hint = f"First: {suspect.message}. {suspect.hint}" if suspect else "Then look for other load on that machine."
    return warning("jitter", text, f"{_ORDER} {hint}")
