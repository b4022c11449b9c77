"""Becomes the command that stands behind `--`, with a promise of the kernel: SIGTERM when the parent dies.

Run as a script by path (`python -I -S trampoline.py PARENT_PID -- COMMAND...`), standard library only. It is
a program of its own and no `preexec_fn`, because code between fork and exec can deadlock in a process that
has threads. SIGTERM and not SIGKILL: vLLM's API server then ends its engine processes itself, which a killed
one leaves behind. The kernel means the thread that started us: the engine room starts engines from the
thread of its event loop, which outlives them.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Exits 127 when the command cannot be run, 143 when the parent is gone already."""
    parent, command = int(sys.argv[1]), sys.argv[3:]
    # Where there is no prctl (not Linux), what was recorded still finds the leftovers.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]!r}: {error.strerror}\n")
        sys.exit(127)


main()
