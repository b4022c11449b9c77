"""`vllm serve` as a process: its argv, its life, its log, and why it failed."""
