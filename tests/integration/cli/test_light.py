"""The command line stays light: heavy packages wait until a command runs."""

import subprocess
import sys

HEAVY = {"numpy", "scipy", "optuna", "aiohttp", "plotly", "pynvml", "aiconfigurator_core", "yaml", "psutil"}


def test_help_imports_nothing_heavy() -> None:
    # In a process of its own, because other tests have imported everything here.
    code = "import sys, tuner.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not HEAVY & set(done.stdout.split())
