"""chunktune: measures the chunked-prefill and prefix-reuse settings of `vllm serve`."""

__version__ = "0.1.0"
