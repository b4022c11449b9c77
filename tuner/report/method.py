"""How a study was measured and on what, in sentences and rows. Pure; reads the profile leniently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tuner.domain.experiment import StudyFile
from tuner.domain.units import counted
from tuner.report.data import ReportData
from tuner.report.numbers import DASH, gib, metric_title
from tuner.report.words import objective_of


def describe_engine(study: StudyFile) -> str:
    """One line under the answer: engine, model, devices."""
    print_ = study.fingerprint
    engine = "the simulated engine" if study.simulated else f"vLLM {print_.vllm_version or 'of unknown version'}"
    return f"{print_.model} on {engine}, {_devices(print_.gpus)}"


def _devices(gpus: Sequence[dict[str, Any]]) -> str:
    names = Counter(str(g.get("name", "a device")) for g in gpus)
    return ", ".join(f"{n} × {name}" for name, n in names.items()) or "no GPU seen"


def fingerprint_rows(study: StudyFile) -> list[tuple[str, str]]:
    """What a measurement depends on beside the setting; unknown is a dash."""
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
        ("Search", f"{study.design.get('sampler') or 'sampler not recorded'}, seed {study.seed}"),
        ("Study made", study.created_at),
        *((name, version) for name, version in sorted(study.versions.items()) if name not in ("vllm", "engine")),
    ]
    return [(name, value or DASH) for name, value in rows]


def describe_method(data: ReportData) -> list[str]:
    """Sentences: load, rounds, cycles, finals, the verdict's rule, percentiles, memory."""
    objective = objective_of(data.study)
    aims = [f"{metric_title(m)} as low as possible" for m in objective.minimize]
    aims += [f"{metric_title(m)} as high as possible" for m in objective.maximize]
    limits = ", ".join(str(c) for c in data.study.profile.get("constraints") or []) or "none"
    sentences = [
        f"Load: {_load(data.study.profile.get('workload'))}.",
        f"Goal: {' and '.join(aims)}. Limits: {limits}.",
        "Each round uses prefixes never sent before. The first requests arrive together and are reported as the cold "
        "burst; the measured requests follow without a pause. A round whose very first request finds cached tokens is "
        "discarded and driven again. In each start, a chunk size has a warm-up before its first round; it does not "
        "count.",
        _starts_sentence(data),
        "Stock is what vLLM runs without chunktune's options. Another setting is chosen only if the lower bound of "
        "its improvement in the finals (one-sided, 3 % error over all finalists together) is above zero and it meets "
        "every limit with a probability of at least 0.9, or if stock itself breaks a limit.",
        "Values are medians of the rounds; percentiles are nearest rank. TTFT runs from the moment a request is due "
        "to its first generated token. Changes are ratios to stock, paired within a cycle where one start measured "
        "both; their intervals take the engine start as the unit of replication.",
        _memory_sentence(data),
    ]
    if data.summary.simulated:
        sentences.insert(0, "Nothing here was measured on a GPU: the engine is a simulation with modelled step times.")
    return [text for text in sentences if text]


def _starts_sentence(data: ReportData) -> str:
    results = data.results
    searches, finals, literal = (len(results.numbers(p)) for p in ("search", "final", "literal"))
    told = ""
    if any(start.live for start in results.starts):
        told = (
            f"{counted(searches, 'engine start')} measured the settings of the search, switched while the engine was "
            "idle and with an emptied prefix cache. A cycle is one pass over the settings still in question, in random "
            "order, all with the same arrivals and lengths. "
        )
    elif searches or results.numbers("single"):
        told = "Each engine start of the search measured one setting. "
    if finals:
        told += (
            f"The finals measured the best settings and stock again, interleaved, on {counted(finals, 'fresh start')}."
        )
    if literal:
        told += " Last, the frozen command was started as it is and measured."
    return told.strip()


def _memory_sentence(data: ReportData) -> str:
    sources = {row.measurement.memory.source for row in data.results.kept()}
    told = {
        "nvml": "Memory is what NVML reports as used on the fullest device during the rounds; it belongs to the engine "
        "start, not to one setting.",
        "host": "Memory is the resident memory of the engine's process tree: there was no GPU to ask.",
        "simulated": "Memory is what the simulated engine models.",
        "unavailable": "Memory could not be measured.",
    }
    return " ".join(text for source, text in told.items() if source in sources)


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
