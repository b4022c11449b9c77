"""What `freeze --format yaml` writes, read by the real vLLM's own parser: the same configuration comes out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen import frozen_of
from tuner.domain.frozen import Frozen
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.freeze import to_args, to_yaml

PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = []
for argv in json.loads(sys.argv[1]):
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    options = parser.parse_args(argv)
    options.model = options.model_tag or options.model
    aside = ("model_tag", "config", "subparser", "dispatch_function")
    parsed.append({name: repr(value) for name, value in vars(options).items() if name not in aside})
print("PARSED" + json.dumps(parsed))
"""

CASES: dict[str, tuple[dict[str, Scalar], ReuseBudget | None]] = {
    "chunked": (
        {
            "max_num_batched_tokens": 512,
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        },
        None,
    ),
    "switched off": (
        {
            "enable_chunked_prefill": False,
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
        },
        None,
    ),
    "odd values": (
        {
            "disable_log_stats": False,
            "seed": 0,
            "gpu_memory_utilization": 1e-05,
            "scheduling_policy": "priority",
            "dtype": "auto",
            "long_prefill_token_threshold": 256,
            "hf_overrides": '{"rope_theta": 1000.5, "nested": {"on": true}}',
            "enable_prompt_tokens_details": True,
        },
        None,
    ),
    "reuse budget": ({"max_num_batched_tokens": 256}, ReuseBudget(min_reuse_ratio=0.8, max_cached_blocks=128)),
}


def frozen_with(args: dict[str, Scalar], budget: ReuseBudget | None) -> Frozen:
    base = frozen_of(start={"command": []})
    return base.model_copy(update={"model": "org/model", "engine_args": args, "reuse_budget": budget})


@pytest.fixture(scope="module")
def parsed(
    vllm_command: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By case: the options that vLLM makes of the YAML and of the command line, in one process."""
    folder = tmp_path_factory.mktemp("yaml")
    argvs = []
    for name, (args, budget) in CASES.items():
        frozen = frozen_with(args, budget)
        path = folder / f"{name.replace(' ', '-')}.yaml"
        path.write_text(to_yaml(frozen))
        argvs += [["serve", "--config", str(path)], shlex.split(to_args(frozen))[1:]]
    done = subprocess.run(
        [str(Path(vllm_command).with_name("python")), "-c", PARSE, json.dumps(argvs)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    both = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("PARSED"))[6:])
    return {name: (both[2 * i], both[2 * i + 1]) for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_yaml_and_command_line_are_the_same_configuration(
    name: str, parsed: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    of_yaml, of_args = parsed[name]
    assert of_yaml == of_args


@pytest.mark.parametrize("name", CASES)
def test_every_frozen_value_arrives(name: str, parsed: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    of_yaml, _ = parsed[name]
    assert of_yaml["model"] == "'org/model'"
    for option, value in CASES[name][0].items():
        expected = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
        assert of_yaml[option] == repr(expected), option


def test_what_is_switched_off_stays_off(parsed: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """vLLM drops a plain `false` without a word; this is why the file says `no-...: true`."""
    of_yaml, _ = parsed["switched off"]
    assert of_yaml["enable_chunked_prefill"] == "False"
    assert of_yaml["enable_prefix_caching"] == "False"


def test_the_plugin_arrives_with_its_settings(parsed: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    of_yaml, _ = parsed["reuse budget"]
    assert "tuner.scheduler.ReuseBudgetScheduler" in of_yaml["scheduler_cls"]
    assert "'min_reuse_ratio': 0.8" in of_yaml["additional_config"]
