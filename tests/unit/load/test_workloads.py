"""Every kind of load: exact lengths, shared where it says so, new for every round, the same for the same key."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tuner.domain.profile import Profile
from tuner.domain.workload import MixedWorkload, PromptsWorkload, SharedPrefixWorkload, TraceWorkload, WorkloadClass
from tuner.errors import FileFormatError, UsageError
from tuner.load.plan import Arrivals, PlannedRequest
from tuner.load.planner import AnyWorkload, make_load
from tuner.load.prompting import Prompter, generator
from tuner.load.vocabulary import Vocabulary
from tuner.load.words import WORDS
from tuner.load.workloads.base import Load

VOCABULARY = Vocabulary(tuple(range(100, 400)), WORDS)
IDS = Prompter("m", "completions", VOCABULARY, ids=True)
TEXT = Prompter("m", "completions", VOCABULARY, ids=False)
CHAT = Prompter("m", "chat", VOCABULARY, ids=False, overhead=5, overhead_system=9)

SHARED = SharedPrefixWorkload(
    system_prompt_tokens=64, user_prompt_tokens=(4, 12), output_tokens=(2, 6), concurrency=8, requests=40
)
OPEN = SharedPrefixWorkload(
    system_prompt_tokens=64, system_prompts=3, user_prompt_tokens=8, output_tokens=4, rate=50, requests=40
)
MIXED = MixedWorkload(
    concurrency=4,
    requests=30,
    classes=[
        WorkloadClass(
            name="chat", weight=9, tenants=2, system_prompt_tokens=(32, 48), user_prompt_tokens=(4, 8), output_tokens=4
        ),
        WorkloadClass(name="document", user_prompt_tokens=(200, 400), output_tokens=(2, 9)),
        WorkloadClass(
            name="visitor",
            visit_every="2.5s",
            tenants=2,
            system_prompt_tokens=80,
            user_prompt_tokens=4,
            output_tokens=2,
        ),
        WorkloadClass(name="side", concurrency=2, user_prompt_tokens=(5, 9), output_tokens=2),
        WorkloadClass(name="drip", rate=4.0, user_prompt_tokens=(5, 9), output_tokens=2),
    ],
)


def trace_file(folder: Path) -> TraceWorkload:
    lines = [
        {
            "timestamp": 1000 + 10 * i,
            "input_length": 100 + i,
            "output_length": 3,
            "hash_ids": [1, 2, 1000 + i, 2000 + i],
        }
        for i in range(20)
    ]
    (folder / "trace.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return TraceWorkload(path="trace.jsonl", block_tokens=32, requests=15)


def prompts_file(folder: Path, **more: Any) -> PromptsWorkload:
    bodies = [
        {
            "messages": [{"role": "system", "content": f"be {i % 2}"}, {"role": "user", "content": f"say {i}"}],
            "top_p": 0.5,
        }
        for i in range(6)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(b) for b in bodies))
    return PromptsWorkload(path="prompts.jsonl", **{"api": "chat", "concurrency": 2, "requests": 9, **more})


def loads(folder: Path) -> list[tuple[AnyWorkload, Prompter]]:
    return [
        (SHARED, IDS),
        (SHARED, TEXT),
        (SHARED, CHAT),
        (OPEN, IDS),
        (MIXED, IDS),
        (MIXED, CHAT),
        (trace_file(folder), IDS),
        (trace_file(folder), TEXT),
        (prompts_file(folder), CHAT),
    ]


def first_requests(arrivals: Arrivals, endless: int = 12) -> list[PlannedRequest]:
    return [arrivals.request(i) for i in range(endless if arrivals.count is None else arrivals.count)]


def everything(load: Load, content_key: str, arrivals_key: str = "a1") -> list[PlannedRequest]:
    return [r for arrivals in load.arrivals(content_key, arrivals_key) for r in first_requests(arrivals)]


def shape(requests: list[PlannedRequest]) -> list[tuple[Any, ...]]:
    """All of a request but its content."""
    return [(r.prompt_tokens, r.output_tokens, r.group, r.prefix, r.at_s) for r in requests]


def beginnings(requests: list[PlannedRequest], prompter: Prompter) -> set[tuple[Any, ...]]:
    return {tuple(prompt_tokens(r.body, prompter)[:8]) for r in requests}


def prompt_tokens(body: bytes, prompter: Prompter) -> list[Any]:
    """As a server with one token a word would count, and a template of 5 tokens, 4 more for a system message."""
    value = json.loads(body)
    if "messages" in value:
        words = [w for m in value["messages"] for w in m["content"].split()]
        return words + [0] * (prompter.overhead if len(value["messages"]) == 1 else prompter.overhead_system)
    return value["prompt"] if isinstance(value["prompt"], list) else value["prompt"].split()


def test_lengths_are_exact(tmp_path: Path) -> None:
    for workload, prompter in loads(tmp_path):
        for request in everything(make_load(workload, prompter, 7, tmp_path), "r1"):
            body = json.loads(request.body)
            assert body["stream"] is True
            assert body["stream_options"] == {"include_usage": True}
            if request.prompt_tokens is not None:
                assert len(prompt_tokens(request.body, prompter)) == request.prompt_tokens
            if request.output_tokens is not None:
                assert body["max_tokens"] == request.output_tokens
                assert body["ignore_eos"] is True


def test_equal_seeds_and_keys_give_equal_bytes(tmp_path: Path) -> None:
    for workload, prompter in loads(tmp_path):
        one, again = (make_load(workload, prompter, 7, tmp_path) for _ in range(2))
        assert everything(one, "r1") == everything(again, "r1")
        assert everything(one, "r1") != everything(make_load(workload, prompter, 8, tmp_path), "r1")


def test_rounds_of_one_arrivals_key_differ_in_content_alone(tmp_path: Path) -> None:
    for workload, prompter in loads(tmp_path):
        load = make_load(workload, prompter, 7, tmp_path)
        one, two = everything(load, "r1", "a1"), everything(load, "r2", "a1")
        assert shape(one) == shape(two)
        assert not beginnings(one, prompter) & beginnings(two, prompter)


@pytest.mark.parametrize("workload", [SHARED, OPEN, MIXED], ids=["closed", "open", "mixed"])
def test_rounds_of_one_content_key_differ_in_lengths_and_times(workload: AnyWorkload) -> None:
    load = make_load(workload, IDS, 7, Path())
    one, two = everything(load, "r1", "a1"), everything(load, "r1", "a2")
    assert shape(one) != shape(two)
    assert beginnings(one[:1], IDS) == beginnings(two[:1], IDS)


def test_times_by_rate_come_from_the_arrivals_key(tmp_path: Path) -> None:
    rated = {"concurrency": None, "rate": 10.0}
    for workload, prompter in [
        (OPEN, IDS),
        (trace_file(tmp_path).model_copy(update=rated), IDS),
        (prompts_file(tmp_path, **rated), CHAT),
    ]:
        load = make_load(workload, prompter, 7, tmp_path)
        dues = [[r.at_s for r in everything(load, *keys)] for keys in (("r1", "a1"), ("r2", "a1"), ("r1", "a2"))]
        assert dues[0] == dues[1] != dues[2]


def test_no_two_requests_of_a_round_are_alike(tmp_path: Path) -> None:
    for workload, prompter in loads(tmp_path):
        requests = everything(make_load(workload, prompter, 7, tmp_path), "r1")
        assert len({r.body for r in requests}) == len(requests)


def test_the_warm_up_has_nothing_in_common_with_a_round(tmp_path: Path) -> None:
    for workload, prompter in loads(tmp_path):
        load = make_load(workload, prompter, 7, tmp_path)
        (warm,) = load.warm_up("warm")
        requests = first_requests(warm)
        assert warm.concurrency == len(requests)
        assert len(requests) >= workload.peak_concurrency
        assert not beginnings(requests, prompter) & beginnings(everything(load, "r1"), prompter)
        longest = load.longest_tokens()
        if longest is not None:
            assert max((r.prompt_tokens or 0) + (r.output_tokens or 0) for r in requests) == longest


def test_cycles_have_the_same_lengths_in_another_order() -> None:
    load = make_load(SHARED, IDS, 7, Path())
    one, two = (everything(load, "r1", key) for key in ("a1", "a2"))
    assert [r.output_tokens for r in one] != [r.output_tokens for r in two]
    assert Counter(r.output_tokens for r in one[8:]) == Counter(r.output_tokens for r in two[8:])
    assert Counter(r.prompt_tokens for r in one[8:]) == Counter(r.prompt_tokens for r in two[8:])
    assert {r.output_tokens for r in one[8:]} == {2, 3, 4, 5, 6}


def test_a_closed_loop_begins_with_a_burst() -> None:
    (arrivals,) = make_load(SHARED, IDS, 7, Path()).arrivals("r1", "a1")
    assert (arrivals.count, arrivals.concurrency, arrivals.cold) == (48, 8, 8)
    prefixes = {tuple(json.loads(r.body)["prompt"][:64]) for r in first_requests(arrivals)}
    assert len(prefixes) == 1


def test_an_open_loop_visits_every_prompt_and_measures_as_many_as_asked() -> None:
    (arrivals,) = make_load(OPEN, IDS, 7, Path()).arrivals("r1", "a1")
    requests = first_requests(arrivals)
    assert arrivals.concurrency is None
    assert arrivals.firsts_are_cold
    assert len(requests) == 43
    assert {r.prefix for r in requests} == {0, 1, 2}
    dues = [r.at_s for r in requests]
    assert dues == sorted(d for d in dues if d is not None)


def test_an_open_loop_that_shares_nothing_has_no_cold_part() -> None:
    workload = SharedPrefixWorkload(system_prompt_tokens=0, user_prompt_tokens=9, output_tokens=1, rate=5, requests=20)
    (arrivals,) = make_load(workload, IDS, 7, Path()).arrivals("r1", "a1")
    assert arrivals.count == 20


def test_a_mixed_load_keeps_proportions_and_tenants_take_turns() -> None:
    lead, visitor, side, drip = make_load(MIXED, IDS, 7, Path()).arrivals("r1", "a1")
    requests = first_requests(lead)
    assert Counter(r.group for r in requests[4:]) == {"chat": 27, "document": 3}
    assert Counter(r.group for r in requests[:4])["chat"] >= 3
    chats = [r.prefix for r in requests if r.group == "chat"]
    assert chats == [chats[0], chats[1]] * (len(chats) // 2) + chats[: len(chats) % 2]
    assert chats[0] != chats[1]
    assert all(r.prefix is None for r in requests if r.group == "document")
    visits = first_requests(visitor, 5)
    dues = [r.at_s or 0.0 for r in first_requests(visitor, 400)]
    gaps = np.diff(dues)
    assert dues[0] == 0.0
    assert gaps.mean() == pytest.approx(2.5, rel=0.05)
    assert gaps.std() == pytest.approx(2.5 / 4, rel=0.15)
    assert visits[0].prefix == visits[2].prefix != visits[1].prefix
    assert visitor.count is None
    assert visitor.concurrency is None
    assert (side.concurrency, side.count) == (2, None)
    assert all(r.at_s is None for r in first_requests(side, 3))
    dues = [r.at_s for r in first_requests(drip, 200)]
    assert dues[-1] == pytest.approx(50, rel=0.3)
    # Asked again, and out of order, an endless process says the same.
    assert visitor.request(1) == visits[1]
    assert drip.request(3).at_s == dues[3]


def test_two_classes_of_one_name_are_refused() -> None:
    cls = WorkloadClass(name="a", user_prompt_tokens=1, output_tokens=1)
    with pytest.raises(UsageError, match="one name"):
        make_load(MixedWorkload(concurrency=1, requests=1, classes=[cls, cls]), IDS, 1, Path())


@pytest.mark.parametrize("prompter", [IDS, TEXT])
def test_equal_hash_ids_are_equal_blocks(tmp_path: Path, prompter: Prompter) -> None:
    (arrivals,) = make_load(trace_file(tmp_path), prompter, 7, tmp_path).arrivals("r1", "a1")
    requests = first_requests(arrivals)
    prompts = [prompt_tokens(r.body, prompter) for r in requests]
    assert len({tuple(p[:64]) for p in prompts}) == 1
    assert len({tuple(p[64:96]) for p in prompts}) == len(prompts)
    # Its own times, the first at 0; the first of the shared prefix is cold, 15 are measured.
    assert [r.at_s for r in requests[:3]] == pytest.approx([0.0, 0.01, 0.02])
    assert len(requests) == 16
    assert arrivals.firsts_are_cold


def test_a_part_of_a_block_is_its_beginning() -> None:
    for prompter in (IDS, TEXT):
        whole, part = (prompter.draw(generator(1, "block"), n) for n in (512, 100))
        assert whole.json_ids.startswith(part.json_ids)
        assert whole.words.startswith(part.words)


def test_a_trace_can_be_played_faster_by_rate_or_closed(tmp_path: Path) -> None:
    base = trace_file(tmp_path)
    (fast,) = make_load(base.model_copy(update={"speed": 2.0}), IDS, 7, tmp_path).arrivals("r1", "a1")
    assert fast.request(2).at_s == pytest.approx(0.01)
    (closed,) = make_load(base.model_copy(update={"concurrency": 4}), IDS, 7, tmp_path).arrivals("r1", "a1")
    assert (closed.count, closed.cold, closed.concurrency) == (19, 4, 4)
    (rated,) = make_load(base.model_copy(update={"rate": 1000.0}), IDS, 7, tmp_path).arrivals("r1", "a1")
    assert 0 < (rated.request(1).at_s or 0) < 0.05


def test_a_trace_that_is_too_short_says_how_many_it_has(tmp_path: Path) -> None:
    base = trace_file(tmp_path)
    with pytest.raises(UsageError, match="only 19 to measure") as caught:
        make_load(base.model_copy(update={"requests": 30}), IDS, 7, tmp_path)
    assert "19 or fewer" in caught.value.hint


def test_long_prompts_of_a_trace_are_cut_where_asked(tmp_path: Path) -> None:
    workload = trace_file(tmp_path).model_copy(update={"max_input_tokens": 40})
    assert {r.prompt_tokens for r in everything(make_load(workload, IDS, 7, tmp_path), "r1")} == {40}


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": []}',
        '{"timestamp": -1, "input_length": 5, "output_length": 1}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',
        '{"timestamp": 0, "input_length"',
        "[]",
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}'
    (tmp_path / "t.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(FileFormatError, match="line 2"):
        make_load(TraceWorkload(path="t.jsonl", requests=1, concurrency=1), IDS, 1, tmp_path)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"nowhere\.jsonl"):
        make_load(TraceWorkload(path="nowhere.jsonl", requests=1), IDS, 1, tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(FileFormatError, match="no lines"):
        make_load(TraceWorkload(path="empty.jsonl", requests=1), IDS, 1, tmp_path)


def test_prompts_keep_what_they_say_behind_a_tag(tmp_path: Path) -> None:
    (arrivals,) = make_load(prompts_file(tmp_path, output_tokens=(3, 5)), CHAT, 7, tmp_path).arrivals("r1", "a1")
    bodies = [json.loads(r.body) for r in first_requests(arrivals)]
    assert len(bodies) == 11
    tag = bodies[0]["messages"][0]["content"].removesuffix("be 0")
    assert len(tag) > 10
    assert bodies[1]["messages"][0]["content"] == f"{tag}be 1"
    assert bodies[0]["messages"][1]["content"] == "say 0"
    assert all(b["top_p"] == 0.5 and b["model"] == "m" and 3 <= b["max_tokens"] <= 5 for b in bodies)
    # The file over again is new content: another tag.
    assert bodies[6]["messages"][0]["content"].endswith("be 0")
    assert bodies[6] != bodies[0]


def test_bodies_with_an_end_of_their_own_or_several_answers_are_asked_for_what_they_say(tmp_path: Path) -> None:
    bodies = [{"prompt": "x"}, {"prompt": "y", "n": 4}, {"prompt": "z", "stop": ["."]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, bodies)))
    workload = PromptsWorkload(path="p.jsonl", concurrency=1, requests=2, output_tokens=5)
    requests = everything(make_load(workload, TEXT, 7, tmp_path), "r1")
    assert [r.output_tokens for r in requests] == [5, 20, None]
    assert all(json.loads(r.body)["max_tokens"] == 5 for r in requests)


def test_ignore_eos_can_be_left_out(tmp_path: Path) -> None:
    for workload, prompter in loads(tmp_path):
        without = workload.model_copy(update={"ignore_eos": False, "output_tokens": (2, 4)})
        load = make_load(without, replace(prompter, ignore_eos=False), 7, tmp_path)
        assert not any("ignore_eos" in json.loads(r.body) for r in everything(load, "r1"))


def test_prompts_by_rate_measure_as_many_as_asked(tmp_path: Path) -> None:
    workload = prompts_file(tmp_path, concurrency=None, rate=10.0, requests=13)
    (arrivals,) = make_load(workload, CHAT, 7, tmp_path).arrivals("r1", "a1")
    requests = first_requests(arrivals)
    assert len(requests) - len({r.prefix for r in requests}) == 13


def test_token_id_prompts_get_a_tag_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 2, 3], "max_tokens": 4}\n{"prompt": [1, 2, 4]}')
    workload = PromptsWorkload(path="p.jsonl", concurrency=1, requests=2)
    prompts = [json.loads(r.body)["prompt"] for r in everything(make_load(workload, IDS, 7, tmp_path), "r1")]
    assert [p[-3:] for p in prompts] == [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
    assert prompts[0][:-3] == prompts[1][:-3] != prompts[2][:-3]


@pytest.mark.parametrize("line", ["{}", '{"messages": []}', '{"prompt": ""}', '{"prompt": ["a", "b"]}'])
def test_a_body_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(FileFormatError, match="line 2"):
        make_load(PromptsWorkload(path="p.jsonl", requests=1, concurrency=1), TEXT, 1, tmp_path)


def test_bodies_of_the_other_kind_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        make_load(prompts_file(tmp_path, api="completions"), TEXT, 1, tmp_path)
    assert caught.value.hint == "Set workload.api to chat."


@pytest.mark.parametrize("name", ["long-documents", "mixed", "tenants", "trace", "prompts"])
def test_ready_profiles_make_a_round_that_fits_their_model(name: str) -> None:
    folder = Path(__file__).parents[3] / "profiles"
    profile = Profile.model_validate(yaml.safe_load((folder / f"{name}.yaml").read_text()))
    prompter = CHAT if profile.workload.api == "chat" else IDS
    load = make_load(profile.workload, prompter, 0, folder)
    lead = load.arrivals("r1", "a1")[0]
    assert lead.count is not None
    assert lead.count >= profile.workload.requests
    longest = load.longest_tokens()
    limit = profile.engine.args["max_model_len"]
    assert isinstance(limit, int)
    assert longest is None or longest <= limit
    assert sum(1 for _ in islice((r for a in load.arrivals("r1", "a1") for r in first_requests(a)), 40)) == 40
