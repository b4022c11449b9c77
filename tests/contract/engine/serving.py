"""What a `vllm serve` does, as checks that the simulated engine and the real one both have to pass.

Each check takes a `Server` started with blocks of 32 tokens, 64 tokens a step, sequences of at most 512 and
`--enable-prompt-tokens-details`, in development mode.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

BLOCK = 32
CHUNK = 64
LENGTH = 512
MODEL = "contract-model"
OPTIONS = (
    *("--served-model-name", MODEL, "--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK)),
    *("--max-model-len", str(LENGTH), "--max-num-seqs", "16", "--num-gpu-blocks-override", "200"),
    "--enable-prompt-tokens-details",
)
_seeds = itertools.count(int(time.time()))


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    log: Path

    def call(self, method: str, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(content) if content[:1] in (b"{", b"[") else content.decode()

    def events(self, path: str, body: dict[str, Any], most: int | None = None) -> Iterator[Any]:
        """The decoded events of a stream, '[DONE]' included; the connection is cut after `most`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            for line in itertools.islice((x for x in answer if x.startswith(b"data: ")), most):
                text = line[6:].strip().decode()
                yield text if text == "[DONE]" else json.loads(text)
        finally:
            connection.close()

    def complete(self, prompt: list[int] | str, tokens: int, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
        status, answer = self.call("POST", "/v1/completions", body)
        assert status == 200, answer
        return dict(answer)

    def metrics(self) -> dict[str, float]:
        """Sample name to its sum over labels."""
        status, text = self.call("GET", "/metrics")
        assert status == 200
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def fresh_tokens(count: int) -> list[int]:
    """Token ids that nobody has sent before."""
    rng = random.Random(next(_seeds))
    return [rng.randrange(3, 800) for _ in range(count)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def started(command: list[str], env: dict[str, str], log: Path, deadline_s: float) -> Iterator[Server]:
    """`command` with host and port added, from its health until its orderly end (exit code 0)."""
    port = free_port()
    argv = [*command, "--host", "127.0.0.1", "--port", str(port)]
    server = Server(port, log)
    with log.open("wb") as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,
        )
    try:
        end = time.monotonic() + deadline_s
        while not healthy(server):
            assert child.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.1)
        yield server
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0, log.read_text()[-3000:]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)


def healthy(server: Server) -> bool:
    try:
        return server.call("GET", "/health")[0] == 200
    except OSError:
        return False


def failed_start(command: list[str], env: dict[str, str], deadline_s: float) -> tuple[int, str]:
    """Exit code and output of a start that does not come about."""
    argv = [*command, "--host", "127.0.0.1", "--port", str(free_port())]
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        timeout=deadline_s,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")


# --- the checks --------------------------------------------------------------------------------------------------


def check_it_names_itself(server: Server) -> None:
    status, version = server.call("GET", "/version")
    assert (status, set(version)) == (200, {"version"})
    status, models = server.call("GET", "/v1/models")
    assert status == 200
    assert [m["id"] for m in models["data"]] == [MODEL]
    assert models["data"][0]["max_model_len"] == LENGTH


def check_the_log_says_chunk_and_capacity(server: Server) -> None:
    log = server.log.read_text()
    assert f"Chunked prefill is enabled with max_num_batched_tokens={CHUNK}." in log
    said = re.search(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for 512 tokens per request: ([\d.]+)x", log)
    assert said is not None
    assert int(said[1].replace(",", "")) == 200 * BLOCK
    assert float(said[2]) == 12.5


def check_a_stream_of_tokens(server: Server) -> None:
    body = {"model": MODEL, "prompt": fresh_tokens(100), "max_tokens": 5, "ignore_eos": True, "stream": True}
    *chunks, usage, end = server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert end == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 100
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["usage"]["total_tokens"] == 105
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 1 <= len(chunks) <= 5
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c["id"] for c in chunks}) == 1
    *chunks, end = server.events("/v1/completions", body)
    assert end == "[DONE]"
    assert all(c["choices"] for c in chunks)


def check_a_chat_begins_with_a_role(server: Server) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "ignore_eos": True,
        "stream": True,
    }
    first, *rest, end = server.events("/v1/chat/completions", body)
    assert end == "[DONE]"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert not first["choices"][0]["delta"].get("content")
    assert all("content" in c["choices"][0]["delta"] for c in rest)
    status, whole = server.call("POST", "/v1/chat/completions", {**body, "stream": False})
    assert status == 200
    assert whole["choices"][0]["message"]["role"] == "assistant"
    assert whole["usage"]["completion_tokens"] == 3


def check_a_shared_prefix_is_found_by_whole_blocks(server: Server) -> None:
    shared = fresh_tokens(100)
    found = [
        server.complete([*shared, *fresh_tokens(20)], 2)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(3)
    ]
    assert found == [0, 96, 96]


def check_the_last_token_is_computed_even_when_all_is_known(server: Server) -> None:
    prompt = fresh_tokens(4 * BLOCK)
    first, again = (server.complete(prompt, 1)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2))
    assert (first, again) == (0, 3 * BLOCK)


def check_a_reset_forgets_prefixes(server: Server) -> None:
    prompt = fresh_tokens(3 * BLOCK + 1)
    server.complete(prompt, 1)
    assert server.call("POST", "/reset_prefix_cache") == (200, {"success": True})
    assert server.complete(prompt, 1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def check_tokenize_agrees_with_the_prompt(server: Server) -> None:
    text = "The quick brown fox, 12 times; ähm."
    status, answer = server.call("POST", "/tokenize", {"model": MODEL, "prompt": text})
    assert status == 200
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == LENGTH
    assert server.complete(text, 1)["usage"]["prompt_tokens"] == answer["count"]
    messages = [{"role": "user", "content": text}]
    status, chat = server.call("POST", "/tokenize", {"model": MODEL, "messages": messages})
    assert status == 200
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    status, whole = server.call("POST", "/v1/chat/completions", body)
    assert whole["usage"]["prompt_tokens"] == chat["count"]


def check_errors_are_error_objects(server: Server) -> None:
    status, answer = server.call("POST", "/v1/completions", {"model": "nobody", "prompt": [5], "max_tokens": 1})
    assert status == 404
    assert answer["error"]["message"].startswith("The model `nobody` does not exist")
    assert (answer["error"]["type"], answer["error"]["code"]) == ("NotFoundError", 404)
    body = {"model": MODEL, "prompt": fresh_tokens(LENGTH + 1), "max_tokens": 1}
    status, answer = server.call("POST", "/v1/completions", body)
    assert status == 400
    assert f"maximum context length is {LENGTH} tokens" in answer["error"]["message"]
    assert answer["error"]["type"] == "BadRequestError"
    status, answer = server.call("POST", "/v1/completions", {**body, "prompt": [10**6]})
    assert (status, answer["error"]["message"]) == (400, "Token id 1000000 is out of vocabulary")
    status, answer = server.call("POST", "/v1/completions", raw=b"{bad")
    assert (status, "error" in answer) == (400, True)
    assert server.call("GET", "/no-such-path")[0] == 404


def check_output_ends_at_the_model_s_length(server: Server) -> None:
    answer = server.complete(fresh_tokens(LENGTH - 2), 30)
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


def check_counters_move_by_what_happened(server: Server) -> None:
    shared = fresh_tokens(64)
    server.complete([*shared, *fresh_tokens(40)], 4)
    before = server.metrics()
    server.complete([*shared, *fresh_tokens(40)], 4)
    after = server.metrics()
    moved = {name: after[name] - before[name] for name in after if name in before}
    assert moved["vllm:prefix_cache_queries_total"] == 104
    assert moved["vllm:prefix_cache_hits_total"] == 64
    assert moved["vllm:prompt_tokens_total"] == 104
    assert moved["vllm:prompt_tokens_cached_total"] == 64
    assert moved["vllm:generation_tokens_total"] == 4
    assert moved["vllm:num_preemptions_total"] == 0
    assert moved["vllm:request_success_total"] == 1
    assert moved["vllm:time_to_first_token_seconds_count"] == 1
    # The prompt's only step brings the first token, then three more.
    assert moved["vllm:iteration_tokens_total_count"] == 4
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert "vllm:prefix_cache_hits_created" in after


def check_steps_without_a_token_are_not_counted(server: Server) -> None:
    before = server.metrics()["vllm:iteration_tokens_total_count"]
    server.complete(fresh_tokens(5 * CHUNK), 2)
    assert server.metrics()["vllm:iteration_tokens_total_count"] - before == 2


def check_metrics_carry_the_engine_and_the_cache(server: Server) -> None:
    _, text = server.call("GET", "/metrics")
    info = re.search(r"^vllm:cache_config_info\{(.*)\} 1\.0$", text, re.MULTILINE)
    assert info is not None
    assert f'block_size="{BLOCK}"' in info[1]
    assert 'num_gpu_blocks="200"' in info[1]
    assert f'kv_cache_size_tokens="{200 * BLOCK}"' in info[1]
    assert re.search(r'^vllm:kv_cache_usage_perc\{engine="0",model_name="contract-model"\} ', text, re.MULTILINE)


def check_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    body = {"model": MODEL, "prompt": fresh_tokens(100), "max_tokens": 400, "ignore_eos": True, "stream": True}
    assert len(list(server.events("/v1/completions", body, most=2))) == 2
    end = time.monotonic() + 20
    while server.metrics()["vllm:num_requests_running"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert server.metrics()["vllm:kv_cache_usage_perc"] == 0


def check_many_at_once_all_get_their_tokens(server: Server) -> None:
    asks = [(fresh_tokens(20 + 9 * i), 2 + i % 7) for i in range(40)]
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = list(pool.map(lambda ask: server.complete(*ask)["usage"], asks))
    for (prompt, tokens), usage in zip(asks, answers, strict=True):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), tokens)


def check_the_development_mode_tells_the_configuration(server: Server) -> None:
    status, info = server.call("GET", "/server_info?config_format=json")
    assert status == 200
    scheduler = info["vllm_config"]["scheduler_config"]
    assert scheduler["max_num_batched_tokens"] == CHUNK
    assert scheduler["max_num_seqs"] == 16
    assert info["vllm_config"]["cache_config"]["block_size"] == BLOCK


CHECKS: tuple[Callable[[Server], None], ...] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_")
)

START_FAILURES = (
    (["--max-num-seqs", "128"], 1, "max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128)."),
    (["--no-enable-chunked-prefill"], 1, "max_num_batched_tokens (64) is smaller than max_model_len (512)."),
    (["--num-gpu-blocks-override", "8"], 1, "KV cache is needed, which is larger than the available KV cache memory"),
    (["--no-such-option"], 2, "error: unrecognized arguments: --no-such-option"),
)
"""Options on top of OPTIONS, the exit code, and what the output says."""
