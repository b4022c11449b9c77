"""`regress`, `compare` and `serve` through the command, against the fake `vllm`: every exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.e2e.commands import alive
from tests.fakes.frozen import frozen_of
from tuner.domain.workload import SharedPrefixWorkload, workload_sha256

FAKE = Path(__file__).parents[1] / "fakes" / "fake_vllm.py"
SCHEMA = Path(__file__).with_name("junit-10.xsd")
CALM = {"ttft_ms": 150, "token_ms": 10}
SLOW = {"ttft_ms": 350, "token_ms": 25}
WORKLOAD = SharedPrefixWorkload(
    system_prompt_tokens=(128, 128),
    user_prompt_tokens=(8, 16),
    output_tokens=(3, 5),
    concurrency=4,
    requests=20,
    request_timeout="3s",  # type: ignore[arg-type]
)
TOLERANT = ("--tolerance", "40")
"""A busy test machine is no regression; the slow script is more than twice as slow. Both are slow enough that a busy
machine is no limit to the client either."""


def chunktune(
    folder: Path, *words: str, script: dict[str, Any] | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuner", *words],
        cwd=folder,
        env=environment(folder, script or CALM, env),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def environment(folder: Path, script: dict[str, Any], more: dict[str, str] | None = None) -> dict[str, str]:
    return {
        **os.environ,
        "FAKE_VLLM": json.dumps(script),
        "CHUNKTUNE_VLLM": shlex.join([sys.executable, str(FAKE)]),
        "CHUNKTUNE_TEST_MARK": str(folder),
        "NO_COLOR": "1",
        **(more or {}),
    }


def write_frozen(path: Path, **changes: Any) -> Path:
    """A frozen file with made-up numbers for the fake `vllm`."""
    document = frozen_of([[100.0, 101.0]], start={"effective_args": {}, "command": []}).to_json()
    document |= {
        "model": "fake/model",
        "engine_args": {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 2048},
        "engine_env": {},
        "startup_timeout_s": 20.0,
        "workload": WORKLOAD.to_json(),
        "workload_sha256": workload_sha256(WORKLOAD),
        "constraints": [],
    }
    document["fingerprint"] |= {"model": "fake/model", "vllm_version": "0.32.0"}
    path.write_text(json.dumps(document | changes))
    return path


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen file that was measured on the calm fake, written by `--rebase`."""
    folder = tmp_path_factory.mktemp("calm")
    start = write_frozen(folder / "start.json")
    done = chunktune(folder, "regress", str(start), "--rebase", "calm.json", "--starts", "3", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert "wrote calm.json" in done.stderr
    return folder / "calm.json"


def run_folders(folder: Path) -> list[Path]:
    """Those of `regress` and `compare`, oldest first."""
    return sorted((folder / "results" / "runs").glob("2*"))


def regress(
    folder: Path, frozen: Path, *words: str, script: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any], subprocess.CompletedProcess[str]]:
    done = chunktune(folder, "regress", str(frozen), "--starts", "2", "--json", *words, script=script)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done


def test_a_rebase_freezes_what_is_measured_and_keeps_the_old_numbers(calm: Path) -> None:
    document = json.loads(calm.read_text())
    assert document["schema"] == "chunktune.frozen/2"
    assert document["measured"]["starts"] == 3
    assert document["measured"]["rounds_per_start"] == [2, 2, 2]
    assert 140 < document["measured"]["median"]["ttft_ms"]["p90"] < 300
    assert [p["measured"]["median"]["ttft_ms"]["p90"] for p in document["previous"]] == [100.5]
    assert (calm.parent / "start.json").read_text() != calm.read_text()


def test_the_same_server_again_is_ok(tmp_path: Path, calm: Path) -> None:
    files = ["--junit", "j.xml", "--markdown", "m.md", "--history", "h.jsonl"]
    code, document, done = regress(tmp_path, calm, *TOLERANT, *files)
    assert code == 0, done.stderr
    assert document["verdict"] == "ok"
    assert set(document["metrics"]["ttft_ms.p90"]) >= {"baseline", "now", "change", "ci95", "verdict"}
    assert document["suspects"] == []
    assert_junit(tmp_path / "j.xml", failures=0, errors=0)
    assert "✅ ok" in (tmp_path / "m.md").read_text()
    rows = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert [row["schema"] for row in rows] == ["chunktune.history/1"]
    (folder,) = run_folders(tmp_path)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 4
    assert json.loads((folder / "starts" / "0001" / "start.json").read_text())["purpose"] == "regress"
    assert json.loads((folder / "result.json").read_text())["verdict"] == "ok"
    assert alive(tmp_path) == []


def test_a_slow_server_has_regressed(tmp_path: Path, calm: Path) -> None:
    words = [*TOLERANT, "--junit", "j.xml", "--markdown", "m.md", "--history", "h.jsonl"]
    regress(tmp_path, calm, *words)
    code, document, done = regress(tmp_path, calm, *words, script=SLOW | {"version": "0.33.0"})
    assert code == 10, done.stderr
    assert document["verdict"] == "regressed"
    assert document["metrics"]["ttft_ms.p90"]["change"] > 0.4
    assert any("vLLM" in s and "0.33.0" in s for s in document["suspects"])
    assert document["starts"]["now"] >= 4
    assert_junit(tmp_path / "j.xml", failures=2, errors=0)
    assert "0.33.0" in (tmp_path / "m.md").read_text()
    verdicts = [json.loads(line)["verdict"] for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert verdicts == ["ok", "regressed"]


def test_a_metric_of_the_gate_that_nobody_can_measure_is_inconclusive(tmp_path: Path, calm: Path) -> None:
    document = json.loads(calm.read_text()) | {"regress_metrics": ["ttft_ms.p90", "kv_cache_usage_peak"]}
    (tmp_path / "f.json").write_text(json.dumps(document))
    code, result, _ = regress(
        tmp_path, tmp_path / "f.json", *TOLERANT, "--junit", "j.xml", script=CALM | {"metrics": "error"}
    )
    assert code == 4
    assert result["metrics"]["kv_cache_usage_peak"]["verdict"] == "inconclusive"
    assert_junit(tmp_path / "j.xml", failures=0, errors=0, skipped=1)


def test_another_gpu_is_not_comparable_and_starts_nothing(tmp_path: Path, calm: Path) -> None:
    document = json.loads(calm.read_text())
    document["fingerprint"]["gpus"] = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}]
    (tmp_path / "f.json").write_text(json.dumps(document))
    code, result, done = regress(tmp_path, tmp_path / "f.json", "--junit", "j.xml", "--history", "h.jsonl")
    assert code == 2
    assert result["verdict"] == "not comparable"
    assert "NVIDIA H100" in done.stderr
    assert "--allow-different" in done.stderr
    assert_junit(tmp_path / "j.xml", failures=0, errors=1)
    assert not list(tmp_path.glob("results/**/*.log"))
    assert not (tmp_path / "h.jsonl").exists()


def test_allow_different_judges_all_the_same(tmp_path: Path, calm: Path) -> None:
    document = json.loads(calm.read_text())
    document["fingerprint"]["gpus"] = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}]
    (tmp_path / "f.json").write_text(json.dumps(document))
    code, _, done = regress(tmp_path, tmp_path / "f.json", *TOLERANT, "--allow-different")
    assert code == 0, done.stderr


def test_an_engine_that_does_not_start_is_no_verdict(tmp_path: Path, calm: Path) -> None:
    script = {"start": [{"log": "cuda_oom_at_start", "exit": 1}]}
    code, document, done = regress(tmp_path, calm, "--junit", "j.xml", "--markdown", "m.md", script=script)
    assert code == 3
    assert document == {}
    assert "Traceback" not in done.stderr
    assert_junit(tmp_path / "j.xml", failures=0, errors=1)
    assert "no verdict" in (tmp_path / "m.md").read_text()


def test_an_option_that_the_installed_vllm_lacks_is_named(tmp_path: Path, calm: Path) -> None:
    script = CALM | {"unknown_options": ["max-num-seqs"]}
    code, _, done = regress(tmp_path, calm, script=script)
    assert code == 3
    assert "--max-num-seqs" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["regress", "missing.json"], "missing.json does not exist"),
        (["regress", "calm.json", "--history", "."], "is a folder"),
        (["regress", "calm.json", "--rebase", "stranger.json"], "stranger.json"),
        (["regress", "calm.json", "--history", "stranger.json"], "no history of chunktune"),
        (["compare", "http://127.0.0.1:1", "calm.json"], "a server and a file"),
        (["compare", "http://127.0.0.1:1", "http://127.0.0.1:1", "--api-key-env", "NOT_SET"], "NOT_SET"),
        (["serve", "missing.json"], "missing.json does not exist"),
        (["freeze", "no-such-study"], "no-such-study"),
    ],
)
def test_wrong_usage_is_one_clear_message(tmp_path: Path, calm: Path, words: list[str], said: str) -> None:
    (tmp_path / "calm.json").write_text(calm.read_text())
    (tmp_path / "stranger.json").write_text('{"schema": "other/1"}\n')
    done = chunktune(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "stranger.json").read_text() == '{"schema": "other/1"}\n'


def interrupt(folder: Path, *words: str, at: str) -> tuple[str, str]:
    """What a command still prints after a SIGINT that follows a line with `at`; it exits 130 and leaves nothing."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tuner", *words],
        cwd=folder,
        env=environment(folder, CALM),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stderr is not None
        for line in iter(child.stderr.readline, ""):
            if at in line:
                break
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 130, err
    finally:
        child.kill()
        child.communicate()
    return out, err


def test_sigint_ends_the_engine_and_exits_130(tmp_path: Path, calm: Path) -> None:
    _, err = interrupt(tmp_path, "regress", str(calm), "--starts", "3", at="ready after")
    assert "interrupted\n  A verdict takes a whole run: start the command again." in err
    assert alive(tmp_path) == []


@pytest.mark.parametrize("command", ["regress", "compare"])
def test_an_interrupted_run_says_what_is_kept(tmp_path: Path, calm: Path, command: str) -> None:
    files = [str(calm)] * (2 if command == "compare" else 1)
    _, err = interrupt(tmp_path, command, *files, "--starts", "3", "--rounds", "1", at="start 2")
    (folder,) = run_folders(tmp_path)
    assert f"1 finished start kept in {folder.relative_to(tmp_path)}" in " ".join(err.split())
    states = [json.loads(f.read_text())["state"] for f in sorted(folder.glob("starts/*/start.json"))]
    assert states == ["completed", "interrupted"]
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_the_simulated_engine_an_and_a_half_times_slower_has_regressed(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        """
version: 1
name: sim
model: meta-llama/Llama-3.1-8B-Instruct
hardware: {gpu: h100_sxm, count: 1, cost_model: meta-llama/Meta-Llama-3.1-8B}
engine: {args: {max_model_len: 8192, max_num_seqs: 64}}
workload: {kind: shared-prefix, system_prompt_tokens: 2048, user_prompt_tokens: [32, 128], output_tokens: [8, 24],
  concurrency: 8, requests: 60}
rounds: 2
space: {max_num_batched_tokens: [512]}
budget: {trials: 1}
"""
    )
    env = {"CHUNKTUNE_VLLM": ""}
    done = chunktune(tmp_path, "sweep", "p.yaml", "--engine", "sim", "--quiet", env=env)
    assert done.returncode == 0, done.stderr
    frozen = str(tmp_path / "results" / "sim" / "frozen.json")
    same = chunktune(tmp_path, "regress", frozen, "--starts", "2", "--tolerance", "20", env=env)
    assert same.returncode == 0, same.stdout + same.stderr
    assert "SIMULATED" in same.stdout
    slow = env | {"CHUNKTUNE_SIM": '{"step_time_scale": 1.5}'}
    worse = chunktune(tmp_path, "regress", frozen, "--starts", "2", "--tolerance", "20", env=slow)
    assert worse.returncode == 10, worse.stdout + worse.stderr


@contextlib.contextmanager
def fake_server(folder: Path, script: dict[str, Any]) -> Iterator[str]:
    """A fake that runs already; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(FAKE), "serve", "fake/model", "--port", str(port), "--host", "127.0.0.1"]
    child = subprocess.Popen(words, env=environment(folder, script), stdout=subprocess.DEVNULL)
    try:
        wait_until_healthy(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_until_healthy(port: int) -> None:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        address = f"http://127.0.0.1:{port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2) as reply:
            if reply.status == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the fake did not come up")


def profile_for(folder: Path) -> str:
    (folder / "p.yaml").write_text(
        """
version: 1
name: pair
model: fake/model
workload: {kind: shared-prefix, system_prompt_tokens: 128, user_prompt_tokens: [8, 16], output_tokens: [3, 5],
  concurrency: 4, requests: 20}
rounds: 3
space: {max_num_batched_tokens: [512]}
"""
    )
    return str(folder / "p.yaml")


def test_compare_names_the_slower_server_from_either_side(tmp_path: Path) -> None:
    profile = profile_for(tmp_path)
    keyed = {"ONE_KEY": "not-to-be-seen"}
    with (
        fake_server(tmp_path, CALM | {"api_key": "not-to-be-seen"}) as calm_url,
        fake_server(tmp_path, SLOW) as slow_url,
    ):
        common = ["--profile", profile, "--json", "--stages", "1", *TOLERANT]
        worse = chunktune(tmp_path, "compare", calm_url, slow_url, "--api-key-env", "ONE_KEY", *common, env=keyed)
        better = chunktune(tmp_path, "compare", slow_url, calm_url, "--api-key-env-b", "ONE_KEY", *common, env=keyed)
        refused = chunktune(tmp_path, "compare", calm_url, slow_url, *common)
    assert worse.returncode == 10, worse.stderr
    assert json.loads(worse.stdout)["verdict"] == "regressed"
    assert json.loads(worse.stdout)["differences"] is None
    assert "3 rounds of each setting" in worse.stderr
    assert "cycle 1, server A: TTFT" in worse.stderr
    assert "cycle 3, server B: TTFT" in worse.stderr
    assert better.returncode == 0, better.stderr
    assert json.loads(better.stdout)["verdict"] == "improved"
    assert refused.returncode == 3
    written = "".join(f.read_text(errors="replace") for f in tmp_path.rglob("*") if f.is_file())
    assert "not-to-be-seen" not in worse.stdout + worse.stderr + better.stdout + better.stderr + written


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_an_interrupted_bench_prints_the_rounds_that_had_finished(tmp_path: Path, words: list[str]) -> None:
    with fake_server(tmp_path, CALM) as url:
        out, err = interrupt(tmp_path, "bench", profile_for(tmp_path), "--url", url, *words, at="cycle 1,")
    assert "rests on 1 of 3 rounds" in err
    if words:
        document = json.loads(out)
        assert (document["schema"], document["purpose"]) == ("chunktune.start/1", "bench")
        assert document["state"] == "interrupted"
        assert len(document["rounds"]) == 1
        assert document["median"]["ttft_ms"]["p90"] > 100
    else:
        assert "median of 1 round, then interrupted" in " ".join(out.split())


def test_a_bench_that_is_interrupted_in_its_first_round_prints_nothing(tmp_path: Path) -> None:
    with fake_server(tmp_path, CALM) as url:
        out, err = interrupt(tmp_path, "bench", profile_for(tmp_path), "--url", url, at="warming up")
    assert out == ""
    assert "None of 3 rounds had finished" in err


def test_compare_of_a_file_with_itself_is_no_difference(tmp_path: Path, calm: Path) -> None:
    done = chunktune(tmp_path, "compare", str(calm), str(calm), "--starts", "2", *TOLERANT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no significant difference" in done.stdout
    assert "A / B: the same configuration" in done.stdout
    assert "A and B are measured on the same starts" in done.stderr
    assert "2 starts in all, 2 rounds of each setting on each" in done.stderr
    assert len(run_folders(tmp_path)) == 1
    assert alive(tmp_path) == []


def test_compare_says_how_two_files_differ(tmp_path: Path, calm: Path) -> None:
    document = json.loads(calm.read_text())
    document["engine_args"]["max_num_batched_tokens"] = 1024
    (tmp_path / "b.json").write_text(json.dumps(document))
    words = ["compare", str(calm), "b.json", "--starts", "1", "--rounds", "1", "--stages", "1", "--no-live", *TOLERANT]
    done = chunktune(tmp_path, *words)
    assert "A / B: max_num_batched_tokens 512 / 1024\n" in done.stdout, done.stderr
    assert "A and B get fresh starts in turn: --no-live was given" in done.stderr
    assert [name in done.stderr for name in ("start 1, A", "start 2, B")] == [True, True]
    document = json.loads((run_folders(tmp_path)[0] / "result.json").read_text())
    assert document["differences"] == {"max_num_batched_tokens": {"a": 512, "b": 1024}}


def test_serve_becomes_the_server_and_sigterm_ends_it_in_order(tmp_path: Path, calm: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tuner", "serve", str(calm), "--", "--port", str(port), "--host", "127.0.0.1"]
    child = subprocess.Popen(
        words, cwd=tmp_path, env=environment(tmp_path, CALM), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until_healthy(port)
        argv = Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")
        assert str(FAKE).encode() in argv
        assert b"--max-num-batched-tokens" in argv
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == 0
    assert "Shutting down" in out
    assert "exec" in err
    assert alive(tmp_path) == []


def test_serve_names_an_option_that_this_vllm_does_not_have(tmp_path: Path, calm: Path) -> None:
    done = chunktune(tmp_path, "serve", str(calm), script=CALM | {"unknown_options": ["max-num-batched-tokens"]})
    assert done.returncode == 3
    assert "--max-num-batched-tokens" in done.stderr


def test_serve_refuses_a_simulated_file(tmp_path: Path, calm: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(json.loads(calm.read_text()) | {"simulated": True}))
    done = chunktune(tmp_path, "serve", "f.json")
    assert done.returncode == 2
    assert "SIMULATED" in done.stderr
    assert "--allow-simulated" in done.stderr


def test_serve_warns_of_extra_arguments_that_override_the_file(tmp_path: Path, calm: Path) -> None:
    done = chunktune(tmp_path, "serve", str(calm), "--dry-run", "--", "--max-num-seqs", "4", "--port", "1")
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs overrides" in done.stderr
    assert done.stdout.rstrip().endswith("--max-num-seqs 4 --port 1")


def assert_junit(path: Path, *, failures: int, errors: int, skipped: int = 0) -> None:
    """Valid against the schema, and with the counts that its cases have."""
    xmlschema = pytest.importorskip("xmlschema")
    xmlschema.XMLSchema(SCHEMA).validate(path)
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
    found = {kind: len(suite.findall(f"testcase/{kind}")) for kind in ("failure", "error", "skipped")}
    assert found == {"failure": failures, "error": errors, "skipped": skipped}
    assert (int(suite.attrib["failures"]), int(suite.attrib["errors"])) == (failures, errors)
