"""How a study was measured and on what, in sentences and rows. Pure; reads the profile leniently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tuner.domain.experiment import StudyFile, Summary, Trial
from tuner.report.answer import objective_of
from tuner.report.numbers import DASH, gib, metric_title


def describe_engine(study: StudyFile) -> str:
    """One line under the answer: engine, model, devices."""
    print_ = study.fingerprint
    engine = "the simulated engine" if study.simulated else f"vLLM {print_.vllm_version or 'of unknown version'}"
    return f"{print_.model} on {engine}, {_devices(print_.gpus)}"


def _devices(gpus: Sequence[dict[str, Any]]) -> str:
    names = Counter(str(g.get("name", "a device")) for g in gpus)
    return ", ".join(f"{n} × {name}" for name, n in names.items()) or "no GPU seen"


def fingerprint_rows(study: StudyFile) -> list[tuple[str, str]]:
    """What a measurement depends on beside the configuration; unknown is a dash."""
    print_ = study.fingerprint
    memory = sorted({gib(g["memory_bytes"]) for g in print_.gpus if g.get("memory_bytes")})
    rows = [
        ("Engine", "simulated" if study.simulated else print_.engine),
        ("vLLM", f"imitates {print_.vllm_version}" if study.simulated and print_.vllm_version else print_.vllm_version),
        ("Model", print_.model),
        ("Model revision", print_.model_revision),
        ("Devices", f"{_devices(print_.gpus)}{' (' + ', '.join(memory) + ' each)' if memory else ''}"),
        ("Driver", print_.driver_version),
        ("Workload", f"sha256 {study.workload_sha256[:12]}"),
        ("Space", f"sha256 {study.space_sha256[:12]}"),
        ("Search", f"{study.sampler}, seed {study.seed}"),
        ("Study made", study.created_at),
        *((name, version) for name, version in sorted(study.versions.items()) if name not in ("vllm", "engine")),
    ]
    return [(name, value or DASH) for name, value in rows]


def describe_method(study: StudyFile, summary: Summary, trials: Sequence[Trial]) -> list[str]:
    """Sentences: load, rounds, percentiles, comparison, objective, constraints, memory."""
    profile = study.profile
    objective = objective_of(study)
    aims = [f"{metric_title(m)} as low as possible" for m in objective.minimize]
    aims += [f"{metric_title(m)} as high as possible" for m in objective.maximize]
    constraints = ", ".join(str(c) for c in profile.get("constraints") or []) or "none"
    sentences = [
        f"Load: {_load(profile.get('workload'))}.",
        "Each round uses a prefix never sent before. A first burst fills the cache and is reported apart as the cold "
        "burst; the measured requests follow without a drain. A discarded warm-up on another prefix comes first. A "
        "round whose very first request finds cached tokens does not count.",
        f"Every configuration ran {profile.get('rounds', 3)} rounds; each value is the median of the rounds. "
        "Percentiles are nearest rank. TTFT runs from the moment a request is due to its first generated token.",
        "The stock configuration is the baseline. Where finals ran, the best candidates and the baseline were measured "
        "once more, interleaved and on fresh starts, and those are the numbers compared here.",
        f"Sought: {' and '.join(aims)}. Constraints: {constraints}.",
        _memory_sentence(trials),
    ]
    if summary.simulated:
        sentences.insert(0, "Nothing here was measured on a GPU: the engine is a simulation with modelled step times.")
    return sentences


def _memory_sentence(trials: Sequence[Trial]) -> str:
    sources = {t.median.memory.source for t in trials if t.median is not None}
    told = {
        "nvml": "Memory is what NVML reports as used on the fullest device, sampled during the rounds; the parts come "
        "from the engine's own log.",
        "host": "Memory is the resident memory of the engine's process tree: there was no GPU to ask.",
        "simulated": "Memory is what the simulated engine models.",
        "unavailable": "Memory could not be measured.",
    }
    return " ".join(text for source, text in told.items() if source in sources) or told["unavailable"]


def _load(workload: Any) -> str:
    if not isinstance(workload, dict):
        return "not recorded"
    kind = str(workload.get("kind", "unknown"))
    parts = [kind]
    if kind == "shared-prefix":
        parts.append(f"system prompt of {_range(workload.get('system_prompt_tokens'))} tokens shared by all requests")
        parts.append(f"{_range(workload.get('user_prompt_tokens'))} tokens of each user's own")
        parts.append(f"{_range(workload.get('output_tokens'))} tokens out")
    if kind == "mixed":
        names = [str(c.get("name")) for c in workload.get("classes") or [] if isinstance(c, dict)]
        parts.append(f"classes {', '.join(names)}")
    if workload.get("path"):
        parts.append(f"from {workload['path']}")
    if workload.get("concurrency"):
        parts.append(f"{workload['concurrency']} requests at a time")
    elif workload.get("rate"):
        parts.append(f"{workload['rate']} requests a second, arriving at random")
    parts.append(f"{workload.get('requests', 'all')} measured requests a round")
    return ", ".join(parts)


def _range(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) == 2:
        return f"{value[0]}" if value[0] == value[1] else f"{value[0]} to {value[1]}"
    return "an unknown number of" if value is None else str(value)
