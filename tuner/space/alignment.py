"""Chunk sizes and the KV block: what has to be a multiple of what, and what it costs when it is not."""

from __future__ import annotations

DEFAULT_BLOCK_SIZE = 16
"""Tokens of a KV block in vLLM on NVIDIA GPUs, unless the profile or the engine says otherwise."""


def can_reuse_prefix(seq_len: int, chunk_size: int, block_size: int = DEFAULT_BLOCK_SIZE) -> bool:
    """Whether every chunk boundary inside a prefix of `seq_len` tokens is also a block boundary.

    `can_reuse_prefix(512, 128)` is true, `can_reuse_prefix(512, 100)` is false. Articles say that a
    prefix prefilled in unaligned chunks cannot be reused. That is not so in vLLM V1 (0.32): a block
    that a chunk leaves half full is completed by the next chunk and is cached then, so an unaligned
    chunk delays the reuse of at most one partial block by one step and loses nothing. Candidates are
    kept aligned because an unaligned one is never better and because kernels prefer whole blocks.
    """
    if min(seq_len, chunk_size, block_size) < 1:
        raise ValueError("lengths are at least one token")
    return chunk_size >= seq_len or chunk_size % block_size == 0


def is_aligned(chunk_size: int, block_size: int) -> bool:
    """Whether the chunk is a whole number of blocks, at least one."""
    return chunk_size >= block_size and chunk_size % block_size == 0


def nearest_aligned(chunk_size: int, block_size: int) -> int:
    """The multiple of `block_size` (at least one block) nearest to `chunk_size`; ties go up."""
    return max(1, (chunk_size + block_size // 2) // block_size) * block_size
