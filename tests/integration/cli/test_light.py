"""The command line stays light: heavy packages wait until a command runs."""

import os
import subprocess
import sys

HEAVY = {"numpy", "scipy", "optuna", "aiohttp", "plotly", "pynvml", "aiconfigurator_core", "yaml", "psutil"}


def test_the_list_of_commands_is_whole_in_80_columns() -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-m", "tuner", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    listed = done.stdout.partition("Commands:\n")[2].splitlines()
    assert len(listed) == 8
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_help_imports_nothing_heavy() -> None:
    # In a process of its own, because other tests have imported everything here.
    code = "import sys, tuner.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not HEAVY & set(done.stdout.split())
