"""The command line. One file per command; heavy imports wait until a command runs."""

from tuner.cli.app import main

__all__ = ["main"]
