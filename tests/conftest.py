"""For all tests."""

from __future__ import annotations

import signal

# A shell's background job starts with SIGINT ignored, and hands that on to the children that tests press Ctrl-C for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
