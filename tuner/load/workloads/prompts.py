"""OpenAI chat or completion bodies from a file."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import orjson

from tuner.domain.workload import PromptsWorkload
from tuner.errors import FileFormatError, UsageError
from tuner.load.arrivals import due_times_s, spread
from tuner.load.plan import Arrivals, PlannedRequest
from tuner.load.prompting import Prompter, generator
from tuner.load.workloads.base import until_measured
from tuner.load.workloads.files import read_lines

_TAG_TOKENS = 8
_STOPS = ("stop", "stop_token_ids")
"""Fields with which an answer may end before its length."""
_FIELDS = (
    "messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "n", "stop", "stop_token_ids", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs",
    "tools", "tool_choice", "response_format", "ignore_eos",
)  # fmt: skip


class PromptsLoad:
    """The bodies in their order, over again when there are too few.

    What a file says never changes, so a second round would be answered from the cache of the first. Each prompt
    therefore begins with a short tag of the round, the same for all of one pass: what prompts share they still
    share, within the pass.
    """

    def __init__(self, workload: PromptsWorkload, prompter: Prompter, seed: int, base_dir: Path) -> None:
        self._workload = workload
        self._prompter = prompter
        self._seed = seed
        self._bodies = parse_bodies(workload, base_dir)
        _refuse_what_the_server_cannot(self._bodies, workload, prompter)
        self.label = describe_bodies(self._bodies)
        openings = Counter(_opening(body) for body in self._bodies)
        self._openings = [text for text, n in openings.items() if n > 1 and text]

    def arrivals(self, content_key: str, arrivals_key: str) -> tuple[Arrivals, ...]:
        workload = self._workload
        passes = workload.requests // len(self._bodies) + 2
        cold = workload.concurrency if workload.concurrency is not None else len(self._openings) * passes
        total = cold + workload.requests
        outputs = None
        if workload.output_tokens is not None:
            outputs = spread(generator(self._seed, arrivals_key, "lengths"), workload.output_tokens, total)
        dues: list[float | None] = [None] * total
        if workload.rate is not None:
            times = generator(self._seed, arrivals_key, "times")
            dues = [*due_times_s(times, workload.rate, workload.burstiness, total)]
        requests = [self._request(content_key, i, outputs[i] if outputs else None, dues[i]) for i in range(total)]
        if workload.open_loop:
            requests = until_measured(requests, workload.requests)
        return (Arrivals.of(requests, workload.concurrency),)

    def warm_up(self, key: str) -> tuple[Arrivals, ...]:
        count = self._workload.peak_concurrency
        longest = max(range(len(self._bodies)), key=lambda i: len(orjson.dumps(self._bodies[i])))
        output = self._workload.output_tokens[1] if self._workload.output_tokens else None
        requests = [self._request(f"{key}/{i}", longest, output, None) for i in range(count)]
        return (Arrivals.together(requests),)

    def longest_tokens(self) -> None:
        return None

    def _request(self, key: str, index: int, output: int | None, due: float | None) -> PlannedRequest:
        turn, which = divmod(index, len(self._bodies))
        source = self._bodies[which]
        body = tagged(deepcopy(source), self._tag(key, turn))
        body["model"] = self._prompter.model
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
        planned = None
        if output is not None:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = output
            if self._workload.ignore_eos:
                body["ignore_eos"] = True
            if not any(body.get(name) for name in _STOPS):
                planned = output * _answers(body)
        opening = _opening(source)
        shared = opening in self._openings
        return PlannedRequest(
            body=orjson.dumps(body),
            prompt_tokens=None,
            output_tokens=planned,
            prefix=turn * len(self._openings) + self._openings.index(opening) if shared else None,
            at_s=due,
        )

    def _tag(self, key: str, turn: int) -> tuple[str, list[int]]:
        rng = generator(self._seed, key, "tag", turn)
        pool = self._prompter.vocabulary.ids
        ids = [pool[int(i)] for i in rng.integers(0, len(pool), _TAG_TOKENS)] if pool else []
        return f"[{rng.integers(0, 1 << 62):016x}] ", ids


def parse_bodies(workload: PromptsWorkload, base_dir: Path) -> list[dict[str, Any]]:
    """The file's bodies; FileFormatError or UsageError names the line."""
    bodies: list[dict[str, Any]] = []
    for where, body in read_lines(workload.path, base_dir, known=_FIELDS):
        messages, prompt = body.get("messages"), body.get("prompt")
        if messages is not None:
            good = isinstance(messages, list) and bool(messages) and all(isinstance(m, dict) for m in messages)
        elif isinstance(prompt, list):
            good = bool(prompt) and all(isinstance(t, int) for t in prompt)
        else:
            good = isinstance(prompt, str) and bool(prompt)
        if not good:
            raise FileFormatError(
                f"{where}: neither `messages` nor `prompt` of an OpenAI request",
                "A prompt is one text or one list of token ids.",
            )
        answers = body.get("n")
        if answers is not None and (not isinstance(answers, int) or answers < 1):
            raise FileFormatError(f"{where}: n is no number of answers: {answers!r}")
        api = "chat" if messages is not None else "completions"
        if api != workload.api:
            raise UsageError(
                f"{where} is a {api} body, the load is sent as {workload.api}", f"Set workload.api to {api}."
            )
        bodies.append(body)
    return bodies


def describe_bodies(bodies: list[dict[str, Any]]) -> str:
    """What the reader of the numbers has to know about this load."""
    said = "each prompt begins with a short tag of its round, so that no round is answered from another's cache"
    several = sum(_answers(body) > 1 for body in bodies)
    if several:
        said += f"; {several} of {len(bodies)} bodies ask for several answers (n), which are timed one by one"
    return said


def _refuse_what_the_server_cannot(bodies: list[dict[str, Any]], workload: PromptsWorkload, prompter: Prompter) -> None:
    if workload.api != prompter.api:
        raise UsageError(
            f"{workload.path} has {workload.api} bodies, the load is sent as {prompter.api}",
            "The server takes no chat requests: give it a --chat-template.",
        )
    if not prompter.vocabulary.ids and any(isinstance(body.get("prompt"), list) for body in bodies):
        raise UsageError(
            f"{workload.path} has token ids, but the server has no /tokenize to draw the round's tag from",
            "Use text prompts.",
        )


def _answers(body: dict[str, Any]) -> int:
    return int(body.get("n") or 1)


def tagged(body: dict[str, Any], tag: tuple[str, list[int]]) -> dict[str, Any]:
    """The body with the tag before everything that it says."""
    text, ids = tag
    if "messages" in body:
        first = body["messages"][0]
        content = first.get("content")
        if isinstance(content, list):
            first["content"] = [{"type": "text", "text": text}, *content]
        else:
            first["content"] = text + (content or "")
    elif isinstance(body["prompt"], list):
        body["prompt"] = ids + body["prompt"]
    else:
        body["prompt"] = text + body["prompt"]
    return body


def _opening(body: dict[str, Any]) -> str:
    """The system message, which several bodies may share; '' where there is none."""
    messages = body.get("messages") or []
    if messages and messages[0].get("role") == "system":
        return str(messages[0].get("content"))
    return ""
