"""A profile as text, as small as one can be, for tests that need a space and no more."""

SMALL = """\
version: 1
name: chat
model: m
workload: {kind: shared-prefix, system_prompt_tokens: 64, user_prompt_tokens: 8, output_tokens: 4,
  concurrency: 2, requests: 4}
space:
  max_num_batched_tokens: [128, 256, 512]
"""
