"""Wrong usage, profiles and files: exit code 2 and one clear message, from the command and from its dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.command import chunktune

PROFILE = """\
version: 1
name: tiny
model: meta-llama/Llama-3.1-8B-Instruct
hardware: {gpu: h100_sxm, count: 1, cost_model: meta-llama/Meta-Llama-3.1-8B}
engine: {args: {max_model_len: 4096, max_num_seqs: 16}}
workload: {kind: shared-prefix, system_prompt_tokens: 256, user_prompt_tokens: 16, output_tokens: 4, concurrency: 4,
  requests: 24}
space: {max_num_batched_tokens: [64, 256]}
"""
SIM = ["--engine", "sim"]
OLD = "results/tiny"
BAD_SWEEPS = {
    "no such profile": (["nonesuch", *SIM], "nonesuch"),
    "unknown key": (["tiny.yaml", *SIM, "--set", "enginee=1"], "did you mean 'engine'"),
    "unaligned chunk": (["tiny.yaml", *SIM, "--set", "space.max_num_batched_tokens=[100]"], "96"),
    "nothing can start": (["tiny.yaml", *SIM, "--set", "engine.args.max_num_seqs=512"], "no setting of it can be"),
    "nothing differs": (["tiny.yaml", *SIM, "--set", "space.max_num_batched_tokens=[8192]"], "is what stock runs"),
    "impossible pair": (["tiny.yaml", *SIM, "--set", "engine.args.max_num_batched_tokens=8"], "max_num_seqs"),
    "unknown knob": (["tiny.yaml", *SIM, "--set", "space.max_num_batched_token=[64]"], "token"),
    "our option": (["tiny.yaml", *SIM, "--set", "space.port=[8000]"], "port"),
    "missing vllm": (["tiny.yaml", "--vllm", "/nonexistent/vllm"], "/nonexistent/vllm"),
    "both engines": (["tiny.yaml", *SIM, "--vllm", "vllm"], "exclude"),
    "bad duration": (["tiny.yaml", *SIM, "--budget", "20"], "unit"),
    "bad study name": (["tiny.yaml", *SIM, "--study", "../x"], "folder"),
    "unknown flag": (["--nonesuch"], "--nonesuch"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(PROFILE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["sweep", "dry run"])
@pytest.mark.parametrize("case", BAD_SWEEPS)
def test_a_sweep_refuses_it(case: str, dry_run: list[str]) -> None:
    words, says = BAD_SWEEPS[case]
    done = chunktune("sweep", *words, *dry_run)
    assert done.code == 2, done.out + done.err
    assert says in done.err
    assert done.out == ""
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sweeep"], "sweep"),
        (["freeze", "."], "study.json"),
        (["sweep", "tiny.yaml", *SIM, "--out", "/proc/none"], "--out"),
    ],
)
def test_other_commands_too(words: list[str], says: str) -> None:
    done = chunktune(*words)
    assert done.code == 2, done.err
    assert says in done.err


@pytest.mark.parametrize(
    "words", [["sweep", "tiny.yaml", *SIM], ["freeze", "results/tiny"], ["report", "results/tiny"]]
)
def test_a_study_of_an_earlier_chunktune_is_refused_by_name(words: list[str]) -> None:
    study = Path(OLD)
    study.mkdir(parents=True)
    (study / "study.json").write_text(json.dumps({"schema": "chunktune.study/1", "study": "tiny"}))
    done = chunktune(*words)
    assert done.code == 2, done.err
    assert "results/tiny was written by an earlier chunktune (chunktune.study/1)" in done.err
    assert "--fresh" in done.err
    assert [f.name for f in study.iterdir()] == ["study.json"], "nothing of it is touched"


def test_a_dry_run_launches_nothing_and_writes_nothing() -> None:
    done = chunktune("sweep", "tiny.yaml", *SIM, "--dry-run")
    assert done.code == 0, done.err
    assert "tuner.sim serve" in done.out
    assert not Path("results").exists()
