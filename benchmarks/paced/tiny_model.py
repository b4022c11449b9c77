"""Make the tiny model: `python benchmarks/paced/tiny_model.py DIR [--hidden 64] [--layers 1]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tuner.sim.tiny_model import make_tiny_model

__all__ = ["make_tiny_model"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a tiny Llama that vLLM loads with --load-format dummy.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.directory, hidden=arguments.hidden, layers=arguments.layers, heads=arguments.heads))
