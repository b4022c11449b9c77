"""Profiles: what is accepted, and what the errors say."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tuner.domain.profile import is_secret_name
from tuner.domain.setting import ReuseBudget
from tuner.domain.workload import SharedPrefixWorkload
from tuner.errors import ProfileError, UsageError
from tuner.profile import load_profile, parse_profile
from tuner.profile.load import ready_profiles

BASE = """\
version: 1
name: chat
model: some/model
workload: {kind: shared-prefix, system_prompt_tokens: 2048, user_prompt_tokens: [32, 128],
  output_tokens: [8, 24], concurrency: 32, requests: 200}
space:
  max_num_batched_tokens: [128, 256]
"""


def test_reads_a_profile() -> None:
    profile = parse_profile(BASE)
    assert isinstance(profile.workload, SharedPrefixWorkload)
    assert profile.workload.user_prompt_tokens == (32, 128)
    assert profile.rounds == 3
    assert profile.objective.metrics == ["ttft_ms.p90"]


def test_survives_a_round_trip_through_its_own_json() -> None:
    profile = parse_profile(BASE + "constraints: [ttft_ms.p99 <= 280]\nbudget: {time: 90m}\n")
    assert type(profile).model_validate(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("extra", "line", "says"),
    [
        ("objektive: {minimize: ttft_ms.p90}", 8, "did you mean 'objective'"),
        ("engine: {argss: {}}", 8, "did you mean 'args'"),
        ("engine:\n  arg: {}", 9, "did you mean 'args'"),
        ("objective: {minimize: ttft.p90}", 8, "did you mean 'ttft_ms.p90'"),
        ("constraints: ['ttft_ms.p99 under 3']", 8, "is no comparison"),
        ("budget: {time: 20}", 8, "has no unit"),
        ("budget: {time: 20 minutes}", 8, "is no duration"),
        ("engine: {startup_timeout: 20}", 8, "has no unit"),
        ("rounds: 0", 8, "rounds"),
        ("references: [stok]", 8, "'stock' or 'no_chunking'"),
        ("name: again", 8, "given twice"),
        ('engine: {args: {dtype: "a\\0b"}}', 8, "NUL"),
    ],
)
def test_an_error_names_the_line_and_the_mend(extra: str, line: int, says: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_profile(BASE + extra + "\n", source="p.yaml")
    assert f"p.yaml, line {line}" in str(caught.value)
    assert says in str(caught.value)


def test_a_misspelt_workload_key_names_the_nearest() -> None:
    with pytest.raises(ProfileError, match="did you mean 'requests'"):
        parse_profile(BASE.replace("requests: 200", "request: 200"))


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="shared-prefix, mixed, trace, prompts"):
        parse_profile(BASE.replace("shared-prefix", "shared"))


@pytest.mark.parametrize(
    "extra",
    [
        "objective: {minimize: groups.nobody.p50}",
        "constraints: [groups.nobody.p99 <= 5]",
        "regress_metrics: [groups.nobody.p50]",
    ],
)
def test_a_class_that_the_load_does_not_have_is_refused(extra: str) -> None:
    with pytest.raises(ProfileError, match=r"groups\.nobody.*no class of this load"):
        parse_profile(BASE + extra + "\n")
    several = BASE.replace("system_prompt_tokens: 2048", "system_prompts: 2, system_prompt_tokens: 2048")
    assert parse_profile(several + "objective: {minimize: groups.system-1.p50}\n")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("rounds: 99999999999999999999", "rounds: the number is too large"),
        ("engine: {args: {max_num_seqs: -99999999999999999999}}", "max_num_seqs: the number is too large"),
        ("rounds: " + "9" * 5000, "cannot be read"),
        ("engine: {env: {MY_TOKEN: abc}}", "MY_TOKEN: a secret does not belong in a profile"),
    ],
    ids=["large", "small", "endless", "secret"],
)
def test_what_could_not_be_written_down_is_refused(extra: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says) as caught:
        parse_profile(BASE + extra + "\n")
    assert "abc" not in str(caught.value)


def test_more_requests_at_a_time_than_any_machine_bears_are_refused() -> None:
    with pytest.raises(ProfileError, match="concurrency"):
        parse_profile(BASE.replace("concurrency: 32", "concurrency: 5000000"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("space.reuse_budget={min_reuse_ratio: [.inf]}", "min_reuse_ratio.0: has to be a finite number"),
        ("space.reuse_budget={min_reuse_ratio: [[1]]}", "min_reuse_ratio.0: has to be a number, a word, true or false"),
        ("space.reuse_budget={max_cached_blocks: {low: 5, high: 1}}", "max_cached_blocks: low (5) is above high (1)"),
        ("space.reuse_budget={yield_chunk_tokens: [true]}", "reuse_budget.yield_chunk_tokens takes numbers"),
        ("space.reuse_budget={yield_chunk_tokens: [many]}", "reuse_budget.yield_chunk_tokens takes numbers"),
        ("space.reuse_budget=[]", "space.reuse_budget: Input should be a valid dictionary"),
        ("space.max_num_batched_tokens=5", "has to be a list of values, or a range with low and high"),
        ("space.refine=[1]", "space.refine: Input should be a valid boolean"),
        ("space.reuse_budget={chunks: [1]}", "reuse_budget has no knob 'chunks'; it has max_cached_blocks"),
        ("objective={minimize: [itl_ms.p99], maximize: [itl_ms.p99]}", "itl_ms.p99 is named twice"),
    ],
)
def test_one_fault_is_one_sentence_without_pydantic_s_words(override: str, says: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile("quick", [override])
    assert says in caught.value.message
    assert len(caught.value.message.splitlines()) == 1
    assert "function-after" not in caught.value.message
    assert "KnobRange" not in caught.value.message


@pytest.mark.parametrize("bad", [{"max_cached_blocks": True}, {"max_cached_blocks": 10**18}, {"max_hold_ms": 1e308}])
def test_a_budget_that_no_plug_in_could_mean_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ReuseBudget.model_validate(bad)


@pytest.mark.parametrize(
    ("name", "secret"),
    [("HF_TOKEN", True), ("PGPASSWORD", True), ("AWS_SECRET_ACCESS_KEY", True), ("OPENAI_API_KEY", True),
     ("TOKENIZERS_PARALLELISM", False), ("VLLM_MAX_TOKENS", False), ("HF_HOME", False)],
)  # fmt: skip
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_a_memory_limit_below_the_preallocation_is_refused_with_the_reason() -> None:
    with pytest.raises(ProfileError, match=r"can never hold.*preallocates"):
        parse_profile(BASE + "constraints: [memory.peak_fraction <= 0.5]\n")


def test_a_memory_limit_above_the_preallocation_is_fine() -> None:
    text = BASE + "engine: {args: {gpu_memory_utilization: 0.8}}\nconstraints: [memory.peak_fraction <= 0.85]\n"
    assert parse_profile(text).constraints[0].limit == 0.85


def test_both_arrivals_are_refused() -> None:
    with pytest.raises(ProfileError, match=r"either concurrency .* or rate"):
        parse_profile(BASE, overrides=["workload.rate=3"])


def test_an_override_is_read_as_yaml() -> None:
    profile = parse_profile(BASE, overrides=["workload.requests=7", "space.max_num_batched_tokens=[64, 96]"])
    assert profile.workload.requests == 7
    assert profile.space.knobs["max_num_batched_tokens"] == [64, 96]


@pytest.mark.parametrize(
    "text",
    [
        "workload.requests",
        "=3",
        "workload.requests.deep=3",
        "constraints.7=x",
        "constraints.²=x",
        "rounds=" + "[" * 3000,
    ],
)
def test_a_bad_override_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_profile(BASE + "constraints: [ttft_ms.p99 <= 280]\n", overrides=[text])


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text", "a: [1,", "a: b: c"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        parse_profile(text)


@pytest.mark.parametrize(
    "text",
    [
        "engine: &a {args: *a}",
        "engine: {args: {a: " + "[" * 3000 + "]" * 3000 + "}}",
        "engine: {args: {a: " + "{a: " * 300 + "1" + "}" * 300 + "}}",
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghi")),
    ],
)
def test_a_profile_without_end_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match="alias"):
        parse_profile(BASE + text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("constraints: [{metric: ttft_ms.p90, op: '!!', limit: 4}]", "constraints.0.op"),
        ("constraints: [{metric: ttft.p90, op: '<=', limit: 4}]", "did you mean 'ttft_ms.p90'"),
        ("constraints: [groups.short <= 4]", "no metric 'groups.short'"),
        ("regress_metrics: [ttft.p90]", "did you mean 'ttft_ms.p90'"),
        ("engine: {env: {A=B: x}}", "cannot be set in an environment"),
        ('engine: {env: {A: "x\\0"}}', "cannot be set in an environment"),
    ],
)
def test_what_would_fail_later_is_refused_now(text: str, says: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(says)):
        parse_profile(BASE + text)


def test_token_counts_are_not_negative() -> None:
    with pytest.raises(ProfileError, match="not negative"):
        parse_profile(BASE, overrides=["workload.system_prompt_tokens=-1"])


def test_another_version_is_refused() -> None:
    with pytest.raises(ProfileError, match="version 2"):
        parse_profile(BASE.replace("version: 1", "version: 2"))


def test_an_unknown_name_names_the_nearest_and_the_ready_ones() -> None:
    with pytest.raises(ProfileError, match="Did you mean quick"):
        load_profile("quik")


def test_a_missing_path_says_so(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="does not exist"):
        load_profile(str(tmp_path / "none.yaml"))


def test_a_missing_trace_file_is_found_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\nname: t\nmodel: m\nworkload: {kind: trace, path: t.jsonl, requests: 3}\n"
        "space: {max_num_batched_tokens: [64]}\n"
    )
    with pytest.raises(ProfileError, match=r"t\.jsonl does not exist"):
        load_profile(str(path))


@pytest.mark.parametrize("name", ready_profiles())
def test_every_ready_profile_loads(name: str) -> None:
    assert load_profile(name).name
