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


class PromptsLoad:
    """The bodies in their order, over again when there are too few.

    What a file says never changes, so a second round would be answered from the cache of the first. Each prompt
    therefore begins with a short tag of the round, the same for all of one pass: what prompts share they still
    share, within the pass.
    """

    label = "each prompt begins with a short tag of its round, so that no round is answered from another's cache"

    def __init__(self, workload: PromptsWorkload, prompter: Prompter, seed: int, base_dir: Path) -> None:
        self._workload = workload
        self._prompter = prompter
        self._seed = seed
        self._bodies = parse_bodies(workload, prompter, base_dir)
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
        if output is not None:
            body.pop("max_completion_tokens", None)
            body.update(max_tokens=output, ignore_eos=True)
        opening = _opening(source)
        shared = opening in self._openings
        return PlannedRequest(
            body=orjson.dumps(body),
            prompt_tokens=None,
            output_tokens=output,
            prefix=turn * len(self._openings) + self._openings.index(opening) if shared else None,
            at_s=due,
        )

    def _tag(self, key: str, turn: int) -> tuple[str, list[int]]:
        rng = generator(self._seed, key, "tag", turn)
        pool = self._prompter.vocabulary.ids
        ids = [pool[int(i)] for i in rng.integers(0, len(pool), _TAG_TOKENS)] if pool else []
        return f"[{rng.integers(0, 1 << 62):016x}] ", ids


def parse_bodies(workload: PromptsWorkload, prompter: Prompter, base_dir: Path) -> list[dict[str, Any]]:
    """The file's bodies; FileFormatError or UsageError names the line."""
    bodies: list[dict[str, Any]] = []
    for number, body in read_lines(workload.path, base_dir):
        where = f"{workload.path}, line {number}"
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
        api = "chat" if messages is not None else "completions"
        if api != prompter.api:
            raise UsageError(
                f"{where} is a {api} body, the load is sent as {prompter.api}",
                f"Set workload.api to {api}."
                if workload.api != api
                else "The server takes no chat requests: give it a --chat-template.",
            )
        if isinstance(prompt, list) and not prompter.vocabulary.ids:
            raise UsageError(
                f"{where} has token ids, but the server has no /tokenize to draw the round's tag from",
                "Use text prompts.",
            )
        bodies.append(body)
    return bodies


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
