"""What a workload's file says, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tuner.domain.workload import PromptsWorkload, TraceWorkload, Workload, unmeasurable
from tuner.errors import UsageError
from tuner.load.reply import whole
from tuner.load.workloads.prompts import describe_bodies, parse_bodies
from tuner.load.workloads.trace_file import choose_lines, describe_trace, parse_trace


def check_workload(workload: Workload, base_dir: Path, metrics: Iterable[str] = ()) -> str:
    """A sentence about the load of a file: rate, lengths, sharing; '' for a load without one.

    FileFormatError names the line that cannot be sent. UsageError says how to mend units that cannot be meant, and
    which of the `metrics` (paths that an objective or a limit names) no round of this load can measure.
    """
    longest = workload.most_output_tokens
    said = ""
    if isinstance(workload, TraceWorkload):
        lines = choose_lines(workload, parse_trace(workload, base_dir))
        longest = max(line.output_tokens for line in lines)
        said = describe_trace(workload, lines)
    elif isinstance(workload, PromptsWorkload):
        bodies = parse_bodies(workload, base_dir)
        asked = [whole(body.get("max_completion_tokens") or body.get("max_tokens")) for body in bodies]
        if longest is None and None not in asked:
            longest = max(n for n in asked if n is not None)
        said = describe_bodies(bodies)
    for metric in metrics:
        why = unmeasurable(metric, longest)
        if why:
            raise UsageError(why, "Ask for at least two output tokens, or take that metric out of the profile.")
    return said
