import pytest

from tuner.domain.measurement import Measurement, Memory
from tuner.domain.observation import CounterDelta
from tuner.measure import cacheable_tokens, memory_note, prefix_note


def _used(**peaks: int) -> Measurement:
    return Measurement(memory=Memory(source="nvml", peak_bytes=peaks))


def test_alike_peaks_do_not_discriminate() -> None:
    note = memory_note([_used(a=72_000, b=72_000), _used(a=72_100, b=72_000), _used(a=72_300, b=71_900)])
    assert note is not None
    assert "not discriminating" in note
    assert "preallocates" in note


@pytest.mark.parametrize(
    "settings",
    [
        [_used(a=72_000), _used(a=60_000)],
        [_used(a=72_000, b=72_000), _used(a=72_000, b=50_000)],
        [_used(a=72_000)],
        [],
        [Measurement(memory=Memory(source="host", peak_bytes={"host": 5})) for _ in range(3)],
        [Measurement(memory=Memory(source="unavailable", reason="no NVML")) for _ in range(3)],
    ],
)
def test_peaks_that_differ_or_say_nothing_are_left_alone(settings: list[Measurement]) -> None:
    assert memory_note(settings) is None


@pytest.mark.parametrize(
    ("prefix", "prompt", "block", "found"),
    [
        (15, 100, 16, 0),
        (16, 100, 16, 16),
        (31, 100, 16, 16),
        (2048, 2131, 16, 2048),
        (2049, 2131, 16, 2048),
        (64, 64, 16, 48),
        (65, 65, 16, 64),
        (16, 16, 16, 0),
        (0, 100, 16, 0),
    ],
)
def test_only_whole_blocks_are_reused_and_the_last_token_is_computed(
    prefix: int, prompt: int, block: int, found: int
) -> None:
    assert cacheable_tokens(prefix, prompt, block) == found


@pytest.mark.parametrize(
    ("prefix", "prompt", "said"),
    [(15, 100, "shorter than one KV block"), (64, 64, "exact multiple"), (16, 16, "exact multiple")],
)
def test_fewer_hits_than_expected_are_explained(prefix: int, prompt: int, said: str) -> None:
    note = prefix_note(prefix, prompt, 16)
    assert note is not None
    assert said in note


@pytest.mark.parametrize(("prefix", "prompt"), [(2048, 2131), (16, 100), (65, 65), (0, 100)])
def test_ordinary_prefixes_need_no_explanation(prefix: int, prompt: int) -> None:
    assert prefix_note(prefix, prompt, 16) is None


def test_a_round_explains_its_short_prefix(make) -> None:
    observation = make.observe([make.request(0, 80.0, cached_tokens=0, prompt_tokens=60)])
    counters = CounterDelta(prefix_hit_rate=0.0)
    found = make.measure(observation, counters=counters, block_size=32, shared_prefix_tokens=24)
    assert any("shorter than one KV block (32 tokens)" in w for w in found.warnings)


@pytest.mark.parametrize(("prompt", "said"), [(20, "longest prompt (20 tokens)"), (500, "enable_prefix_caching")])
def test_a_round_without_hits_says_what_it_may_come_from(make, prompt: int, said: str) -> None:
    observation = make.observe([make.request(0, 80.0, cached_tokens=0, prompt_tokens=prompt)])
    found = make.measure(observation, counters=CounterDelta(prefix_hit_rate=0.0), block_size=32)
    assert any(said in w for w in found.warnings)
