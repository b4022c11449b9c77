"""The paced worker inside the engine process.

vLLM's CPU build runs its worker in a process of its own, and the engine then waits for it in a busy loop: on a
small machine that takes a processor away from the server and the client, and the pace with it.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class PacedExecutor(UniProcExecutor):
    """For `--distributed-executor-backend`; a name that vLLM does not know is not replaced on the CPU."""
