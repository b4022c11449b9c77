"""Options to argv and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.engine.argv import from_argv, to_argv

keys = st.from_regex(r"[a-z][a-z0-9]{0,6}(_[a-z0-9]{1,6}){0,3}", fullmatch=True).filter(
    lambda k: not k.startswith("no_")
)
# A word that looks like a number is one on a command line: it cannot come back as a word.
words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12).filter(
    lambda w: type(next(iter(from_argv([f"--x={w}"]).values()))) is str
)
values = st.one_of(st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False), words)


@given(st.dictionaries(keys, values, max_size=6))
def test_round_trip(args: dict[str, int | float | str | bool]) -> None:
    back = from_argv(to_argv(args))
    assert back == args
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in args.items()}


def test_forms() -> None:
    argv = to_argv(
        {
            "max_num_seqs": 64,
            "enable_chunked_prefill": False,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.9,
            "seed": None,
            "max_model_len": -1,
            "additional_config": {"b": 1, "a": [2]},
        }
    )
    assert argv == [
        *("--max-num-seqs", "64"),
        "--no-enable-chunked-prefill",
        "--enable-prefix-caching",
        *("--gpu-memory-utilization", "0.9"),
        "--max-model-len=-1",
        *("--additional-config", '{"a":[2],"b":1}'),
    ]


def test_the_last_of_equal_options_wins() -> None:
    assert from_argv(["--seed", "1", "--seed=2"]) == {"seed": 2}


@pytest.mark.parametrize("argv", [["64"], ["-x"], ["--"]])
def test_what_is_no_option_is_refused(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="is no option"):
        from_argv(argv)
