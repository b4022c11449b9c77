"""How long `chunktune --help` takes, beside a Python that starts and does nothing.

    python benchmarks/startup.py [--json] [--runs 15]

The limit is half a second: a command line that makes people wait for its help is not used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

LIMIT_S = 0.5
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "chunktune --help": [sys.executable, "-m", "tuner", "--help"],
    "chunktune sweep --help": [sys.executable, "-m", "tuner", "sweep", "--help"],
    "chunktune --version": [sys.executable, "-m", "tuner", "--version"],
}
HEAVY = ("numpy", "scipy", "optuna", "aiohttp", "plotly", "pynvml", "aiconfigurator_core", "pydantic")


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return time.perf_counter() - began


def heavy_imports() -> list[str]:
    """Which of the heavy packages `chunktune --help` imports."""
    code = "import sys, tuner.cli.app; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return [name for name in HEAVY if name in modules.stdout.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs):  # in turn, so that a busy moment meets all of them
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    rows = {
        name: {"median_s": statistics.median(values), "max_s": max(values), "limit_s": LIMIT_S}
        for name, values in taken.items()
    }
    heavy = heavy_imports()
    if arguments.json:
        print(json.dumps({"rows": rows, "heavy_imports": heavy}))
    else:
        print(f"{'command':28}{'median':>10}{'max':>10}{'limit':>10}")
        for name, row in rows.items():
            print(f"{name:28}{row['median_s']:>8.3f} s{row['max_s']:>8.3f} s{row['limit_s']:>8.1f} s")
        print(f"heavy packages imported for --help: {', '.join(heavy) or 'none'}")
    return 0 if rows["chunktune --help"]["median_s"] < LIMIT_S and not heavy else 1


if __name__ == "__main__":
    sys.exit(main())
