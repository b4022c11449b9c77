"""One streamed request, and what it shows of a server: what a round would null, discard or misread."""

from __future__ import annotations

import secrets

import orjson

from tuner.clock import Clock
from tuner.doctor.line import Line, ok, warning, wrong
from tuner.domain.observation import RequestRecord
from tuner.load.drive import drive
from tuner.load.plan import Arrivals, PlannedRequest, RoundPlan
from tuner.load.probe import ServerFacts
from tuner.load.prompting import asked_for
from tuner.load.target import Target

TOKENS = 32
_CHECK = "stream"
_SWITCH = "Set workload.ignore_eos: false; answers then end where the model ends them."


async def ask_stream(target: Target, facts: ServerFacts, clock: Clock, *, ignore_eos: bool) -> RequestRecord:
    """What came of one request for `TOKENS` tokens, sent as the load sends its own."""
    text = f"{secrets.token_hex(8)} Tell a long story about the sea."
    chat = facts.api == "chat"
    prompt: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = orjson.dumps({"model": facts.model, **prompt, **asked_for(TOKENS, ignore_eos=ignore_eos)})
    plan = RoundPlan(
        key="doctor",
        path="/v1/chat/completions" if chat else "/v1/completions",
        arrivals=(Arrivals.together([PlannedRequest(body, None, TOKENS)]),),
        phase="warmup",
        must_start_cold=False,
        reports_finish=facts.reports_finish,
    )
    return (await drive(target, plan, clock)).records[0]


def judge_stream(record: RequestRecord, *, ignore_eos: bool) -> list[Line]:
    """Every finding about that request; one line that says so when there is none. Pure."""
    if not record.ok:
        broke = record.deltas and ignore_eos
        hint = f"If it breaks with `ignore_eos`: {_SWITCH}" if broke else "See the server's log."
        return [wrong(_CHECK, f"one streamed request for {TOKENS} tokens failed: {record.error}", hint)]
    tokens = record.output_tokens
    lines: list[Line] = []
    if record.collected:
        lines.append(
            wrong(
                _CHECK,
                f"the answer arrived in one piece, or in few, after {record.ttft_ms:.0f} ms: ITL and TPOT cannot be "
                "measured, and TTFT is the time of that piece",
                "Measure the engine itself, or turn buffering off in what stands before it (nginx: proxy_buffering "
                "off).",
            )
        )
    if tokens is None:
        lines.append(
            warning(
                _CHECK,
                "`usage` does not tell output tokens: neither throughput in tokens nor TPOT will be measured, and "
                "answers that end early are not seen",
                "Measure vLLM itself rather than a gateway in front of it.",
            )
        )
    elif tokens != TOKENS * record.choices and ignore_eos:
        lines.append(
            wrong(
                _CHECK,
                f"{TOKENS} tokens were asked for with `ignore_eos`, {tokens} were given (finish reason "
                f"{record.finish_reason or 'none'}): every round would be discarded",
                _SWITCH,
            )
        )
    if record.choices > 1:
        lines.append(
            warning(
                _CHECK,
                f"one request gets {record.choices} answers, though one was asked for",
                "See the server's defaults (n), or what stands before it.",
            )
        )
    return lines or [ok(_CHECK, _figures(record))]


def _figures(record: RequestRecord) -> str:
    said = f"{record.output_tokens} tokens in {record.deltas} pieces, TTFT {record.ttft_ms:.0f} ms"
    if record.tpot_ms is not None:
        said += f", TPOT {record.tpot_ms:.1f} ms"
    if record.keep_alives:
        said += f"; {record.keep_alives} empty deltas besides, which are not counted as tokens"
    return said
