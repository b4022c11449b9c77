"""A node with eight GPUs, for the fake `vllm` to start on."""
