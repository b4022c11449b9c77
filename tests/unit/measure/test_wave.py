import numpy as np
import pytest

from tuner.domain.observation import RequestRecord, RoundObservation
from tuner.measure.wave import in_step, wave_warning
from tuner.sim.core import Core, SchedulerConfig
from tuner.sim.cost import LinearCost
from tuner.sim.virtual import Ask, run_closed_loop


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


def test_equal_outputs_run_in_a_wave_and_the_hint_is_given(make) -> None:
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


@pytest.mark.parametrize(
    ("outputs", "warned"), [((16, 16), True), ((15, 17), True), ((8, 24), False), ((4, 40), False)]
)
def test_so_it_is_with_a_real_scheduler(make, outputs: tuple[int, int], warned: bool) -> None:
    """The simulated engine in virtual time: 16 slots, a shared prefix, prompts of many lengths."""
    rng = np.random.default_rng(11)
    prefix = rng.integers(0, 900, 256).tolist()
    asks = [
        Ask(
            prefix + rng.integers(0, 900, int(rng.integers(32, 129))).tolist(),
            int(rng.integers(outputs[0], outputs[1] + 1)),
        )
        for _ in range(136)
    ]
    core = Core(SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64, max_model_len=4096, num_blocks=4000))
    records = []
    for index, answer in enumerate(run_closed_loop(core, LinearCost(), asks, concurrency=16)):
        times = answer.token_times_s
        record = make.request(index, 1.0, np.diff(times) * 1e3, phase="cold" if index < 16 else "measured")
        record.sent_s = record.intended_s = answer.sent_s
        record.first_token_s, record.last_token_s, record.finished_s = times[0], times[-1], times[-1]
        records.append(record)
    assert (wave_warning(make.observe(records, concurrency=16)) is not None) is warned
