"""What an installed vLLM says about itself."""

from __future__ import annotations

import pytest

from tuner.engine.installed import InstalledEngine, check_options, parse_options, parse_version
from tuner.errors import EngineError

HELP = """usage: vllm serve [model_tag] [options]

Search by using: `--help=<ConfigGroup>` to explore options by section (e.g.,
--help=ModelConfig, --help=Frontend)

SchedulerConfig:
  --enable-chunked-prefill, --no-enable-chunked-prefill
                        See --not-an-option for more. (default: None)
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many. (default: None)
  --scheduling-policy {fcfs,priority}
  --aggregate-engine-logging
                        Log aggregate. (default: False)
  -h, --help            show this help message and exit
"""
INSTALLED = InstalledEngine("0.32.0", parse_options(HELP))


def test_options_are_read_from_the_help() -> None:
    assert INSTALLED.options == {
        "enable_chunked_prefill",
        "no_enable_chunked_prefill",
        "api_server_count",
        "scheduling_policy",
        "aggregate_engine_logging",
        "help",
    }


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("0.32.0\n", "0.32.0"),
        ("Triton is installed, but\nWARNING 1.2 x\n0.32.0+cpu\n", "0.32.0+cpu"),
        ("v0.9.1", "0.9.1"),
        ("hello", None),
    ],
)
def test_version(output: str, version: str | None) -> None:
    assert parse_version(output) == version


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(EngineError) as caught:
        check_options(INSTALLED, {"scheduler_policy": "fcfs"})
    assert caught.value.diagnosis.code == "unknown_option"
    assert "--scheduling-policy" in caught.value.message
    assert "0.32.0" in caught.value.message


def test_a_switch_that_has_no_negation() -> None:
    check_options(INSTALLED, {"enable_chunked_prefill": False, "aggregate_engine_logging": True})
    with pytest.raises(EngineError, match="cannot be negated"):
        check_options(INSTALLED, {"aggregate_engine_logging": False})


def test_where_nothing_could_be_asked_nothing_is_refused() -> None:
    check_options(InstalledEngine(None, frozenset()), {"anything": 1})
