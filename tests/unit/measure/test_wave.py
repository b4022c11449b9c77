import numpy as np
import pytest

from tuner.domain.observation import RequestRecord, RoundObservation
from tuner.measure.wave import in_step, wave_warning


def closed_loop(make, lengths: list[int], *, concurrency: int = 16, jitter: float = 0.0) -> RoundObservation:
    """Slots that send as soon as their answer is whole; TTFT 100 ms, then 20 ms a token."""
    rng = np.random.default_rng(3)
    free_s = [0.0] * concurrency
    records: list[RequestRecord] = []
    for index, length in enumerate(lengths):
        slot = int(np.argmin(free_s))
        record = make.request(index, 100.0, [20.0] * (length - 1))
        move = free_s[slot] + float(rng.uniform(0, jitter)) - record.sent_s
        for name in ("sent_s", "intended_s", "first_token_s", "first_answer_s", "last_token_s", "finished_s"):
            setattr(record, name, getattr(record, name) + move)
        free_s[slot] = record.finished_s or 0.0
        records.append(record)
    return make.observe(records, concurrency=concurrency)


def test_equal_outputs_run_in_a_wave_and_the_mend_is_named(make) -> None:
    note = wave_warning(closed_loop(make, [16] * 200))
    assert note is not None
    assert "waves" in note
    assert "give output_tokens a range" in note
    assert note in make.measure(closed_loop(make, [16] * 200)).warnings


def test_a_wave_that_blurs_a_little_is_still_one(make) -> None:
    assert wave_warning(closed_loop(make, [16] * 200, jitter=0.01)) is not None


@pytest.mark.parametrize("seed", range(5))
def test_spread_outputs_do_not(make, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(8, 25, 200).tolist()
    assert wave_warning(closed_loop(make, lengths)) is None


def test_an_open_loop_or_too_few_cycles_have_no_wave(make) -> None:
    open_loop = closed_loop(make, [16] * 200)
    open_loop.client.asked_in_flight = None
    assert in_step(open_loop) is None
    assert in_step(closed_loop(make, [16] * 40)) is None
