"""`vllm serve`'s argv, as far as the simulated engine models it; anything else is refused as vLLM refuses it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

VERSION = "0.32.0"
"""The vLLM whose rules, options and texts these are."""
NAME = re.compile(r"^--(?:no-)?[A-Za-z_][\w-]*")


class _Parser(argparse.ArgumentParser):
    """Takes underscores for dashes, as vLLM's parser does."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_dashed(arg) for arg in argv], namespace)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


def _dashed(arg: str) -> str:
    match = NAME.match(arg)
    return match.group(0).replace("_", "-") + arg[match.end() :] if match else arg


def _size(text: str) -> int:
    """A whole number, also as `8k` (decimal) or `8K` (binary), as vLLM reads lengths."""
    factors = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    try:
        if text and text[-1] in factors:
            return int(float(text[:-1]) * factors[text[-1]])
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to a JSON object: {error}") from None


def serve_parser() -> argparse.ArgumentParser:
    """Options under vLLM's names; those in the last group are taken and change nothing here."""
    parser = _Parser(prog="vllm", add_help=False, allow_abbrev=False, usage="vllm serve [model_tag] [options]")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("model_tag", nargs="?", help="The model tag to serve")
    parser.add_argument("-h", "--help", nargs="?", const="all", default=None, metavar="GROUP")
    parser.add_argument("--model", help="Name of the model to serve")
    parser.add_argument("--config", help="Read options from a YAML file")

    front = parser.add_argument_group("Frontend")
    front.add_argument("--host", default=None, help="Host name")
    front.add_argument("--port", type=int, default=8000, help="Port number")
    front.add_argument("--served-model-name", nargs="+", default=None)
    front.add_argument("--api-key", nargs="+", default=None)
    front.add_argument("--enable-prompt-tokens-details", action=flag, default=False)
    front.add_argument("--enable-force-include-usage", action=flag, default=False)
    front.add_argument("--disable-uvicorn-access-log", action=flag, default=False)
    front.add_argument("--chat-template", default=None)

    parallel = parser.add_argument_group("ParallelConfig")
    parallel.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parallel.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1, choices=[1])
    parallel.add_argument("--data-parallel-size", "-dp", type=int, default=1, choices=[1])

    model = parser.add_argument_group("ModelConfig")
    model.add_argument("--max-model-len", type=_size, default=None)
    model.add_argument("--seed", type=int, default=0)

    cache = parser.add_argument_group("CacheConfig")
    cache.add_argument("--block-size", type=int, default=16)
    cache.add_argument("--enable-prefix-caching", action=flag, default=True)
    cache.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    cache.add_argument("--kv-cache-memory-bytes", type=_size, default=None)
    cache.add_argument("--num-gpu-blocks-override", type=int, default=None)

    scheduler = parser.add_argument_group("SchedulerConfig")
    scheduler.add_argument("--max-num-batched-tokens", type=_size, default=None)
    scheduler.add_argument("--max-num-seqs", type=_size, default=None)
    scheduler.add_argument("--max-num-scheduled-tokens", type=_size, default=None)
    scheduler.add_argument("--max-num-active-seqs", type=_size, default=None)
    scheduler.add_argument("--long-prefill-token-threshold", type=_size, default=0)
    scheduler.add_argument("--long-prefill-token-threshold-adaptive", action=flag, default=False)
    scheduler.add_argument("--enable-chunked-prefill", action=flag, default=True)
    scheduler.add_argument("--async-scheduling", action=flag, default=True)
    scheduler.add_argument("--scheduler-reserve-full-isl", action=flag, default=True)
    scheduler.add_argument("--watermark", type=float, default=0.0)
    scheduler.add_argument("--scheduling-policy", choices=["fcfs"], default="fcfs")
    scheduler.add_argument("--scheduler-cls", default=None)
    scheduler.add_argument("--additional-config", type=_json, default={})

    idle = parser.add_argument_group("Taken without effect")
    for name in ("--dtype", "--load-format", "--tokenizer", "--revision", "--tokenizer-revision", "--download-dir"):
        idle.add_argument(name, default=None)
    idle.add_argument("--generation-config", default="auto")
    idle.add_argument("--distributed-executor-backend", default=None)
    idle.add_argument("--uvicorn-log-level", default="info")
    idle.add_argument("--max-log-len", type=int, default=None)
    idle.add_argument("--shutdown-timeout", type=int, default=0)
    for name in ("--trust-remote-code", "--enforce-eager", "--enable-log-requests", "--disable-custom-all-reduce"):
        idle.add_argument(name, action=flag, default=False)
    idle.add_argument("--disable-log-stats", action="store_true")
    return parser


def parse_serve(argv: Sequence[str]) -> argparse.Namespace:
    """The options of `serve`; leaves with vLLM's usage text and exit code 2 when they are wrong."""
    parser = serve_parser()
    options = parser.parse_args(_with_config(parser, list(argv)))
    if options.help is not None:
        parser.print_help(sys.stdout)
        parser.exit(0)
    options.model = options.model_tag or options.model
    if not options.model:
        parser.error("the following arguments are required: model_tag")
    return options


def _with_config(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """The options of `--config FILE` in front of the command line, which wins."""
    for index, arg in enumerate(argv):
        if arg == "--config" or arg.startswith("--config="):
            path = argv[index + 1] if arg == "--config" and index + 1 < len(argv) else arg.partition("=")[2]
            break
    else:
        return argv
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"Unable to read the config file at {path}. Check path correctness ({error})")
    if not isinstance(content, dict):
        parser.error(f"Config file {path} holds no options")
    model = content.pop("model", None)
    positional = [] if argv and not argv[0].startswith("-") else [str(model)] if model else []
    rest = argv
    if not positional and argv and not argv[0].startswith("-"):
        positional, rest = [argv[0]], argv[1:]
    return [*positional, *_file_options(parser, content), *rest]


def _file_options(parser: argparse.ArgumentParser, content: dict[str, Any]) -> list[str]:
    """A false value becomes `--no-KEY` where exactly that option exists, and is dropped without a word elsewhere."""
    known = parser._option_string_actions
    out: list[str] = []
    for key, value in content.items():
        if isinstance(value, bool):
            if value:
                out.append(f"--{key}")
            elif f"--no-{key}" in known:
                out.append(f"--no-{key}")
        elif isinstance(value, list):
            out.extend([f"--{key}", *map(str, value)] if value else [])
        else:
            out.extend([f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)])
    return out
