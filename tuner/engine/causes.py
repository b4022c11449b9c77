"""The causes that a log can name: what they look like, what they mean, what to do. Data, and no more.

The texts were read off vLLM 0.32.0, its dependencies and older versions; each pattern is one that only
this failure prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Cause:
    """A stable code with the sentence that opens its message, and the hint."""

    sentence: str
    hint: str


CAUSES: Final[dict[str, Cause]] = {
    "cuda_oom": Cause(
        "the device ran out of memory",
        "Lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization: activations of a larger step "
        "need room beside the KV pool.",
    ),
    "weights_too_large": Cause(
        "the model's weights do not fit on these GPUs",
        "Raise engine.args.tensor_parallel_size, take GPUs with more memory, or serve a quantized model.",
    ),
    "no_free_memory": Cause(
        "the device has less free memory than the engine asks for",
        "Another process holds it (see nvidia-smi), or the last engine's memory has not come back yet: free it, "
        "or lower gpu_memory_utilization.",
    ),
    "kv_cache_too_small": Cause(
        "the KV cache cannot hold one request of the model's length",
        "Lower max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization.",
    ),
    "port_in_use": Cause(
        "the port is taken by another process", "Run it again: another free port is taken at each start."
    ),
    "unknown_option": Cause(
        "the installed vLLM has no such option",
        "Look it up in `vllm serve --help=all` of the installed version and correct the profile.",
    ),
    "bad_option_value": Cause(
        "the installed vLLM does not take this value of an option",
        "Look up the option in `vllm serve --help=all` and correct the profile.",
    ),
    "invalid_combination": Cause("these options do not go together", "Change one of the options that it names."),
    "block_size": Cause(
        "the block size does not suit this engine's attention backend",
        "Set engine.args.block_size to a multiple of what the message names (32 on the CPU), or leave it out.",
    ),
    "gated_model": Cause(
        "the model is gated and this account has no access",
        "Accept the model's terms on its page and set HF_TOKEN to a token of that account.",
    ),
    "missing_model": Cause(
        "the model was not found",
        "Check the model's name or path; a private one needs HF_TOKEN, and HF_HUB_OFFLINE=1 forbids downloads.",
    ),
    "unsupported_model": Cause(
        "the installed vLLM does not support this model's architecture", "Upgrade vLLM, or serve another model."
    ),
    "missing_tokenizer": Cause(
        "the model's tokenizer is missing or cannot be read",
        "Put the tokenizer files beside the weights, or name them with the option `tokenizer`.",
    ),
    "no_chat_template": Cause(
        "the model has no chat template",
        "Set workload.api to completions, or pass one with the option `chat_template`.",
    ),
    "unsupported_gpu": Cause(
        "the GPUs of this machine do not fit", "Check the driver, the GPU's capability, dtype and tensor_parallel_size."
    ),
    "too_few_gpus": Cause(
        "the engine is spread over more GPUs than there are",
        "Lower engine.args.tensor_parallel_size, or check CUDA_VISIBLE_DEVICES; on the simulated engine raise "
        "hardware.count.",
    ),
    "plugin_failed": Cause(
        "the scheduler plug-in could not be loaded in the engine",
        "Leave reuse_budget out of the space or tune with --no-live, or install a vLLM version that the plug-in knows.",
    ),
    "nccl_failed": Cause(
        "the GPUs could not talk to one another (NCCL)",
        "Set NCCL_DEBUG: INFO in engine.env and read the log; check /dev/shm, NVLink and the network interfaces.",
    ),
    "rendezvous_timeout": Cause(
        "the engine's processes did not find one another in time",
        "See the log of the process that is missing; check firewall rules, VLLM_HOST_IP and the host's load.",
    ),
    "shm_too_small": Cause(
        "/dev/shm is full or too small",
        "Start the container with --ipc=host or a larger --shm-size (Kubernetes: an emptyDir with medium Memory).",
    ),
    "disk_full": Cause(
        "no space is left on a disk that the engine writes to",
        "Free space, or point HF_HOME and VLLM_CACHE_ROOT in engine.env at a larger disk.",
    ),
    "driver_too_old": Cause(
        "the NVIDIA driver is too old for this build of vLLM",
        "Update the driver, or install a vLLM built for the driver's CUDA version (nvidia-smi shows it).",
    ),
    "device_busy": Cause(
        "a GPU is busy or does not allow another process",
        "See nvidia-smi for who uses it, and its compute mode (nvidia-smi -q -d COMPUTE; `-c DEFAULT` allows sharing).",
    ),
    "gpu_fault": Cause(
        "a GPU reports a hardware error", "Take the GPU out of service: see `nvidia-smi -q -d ECC` and dmesg (Xid)."
    ),
    "memory_profiling_failed": Cause(
        "another process freed GPU memory while the engine measured its own",
        "Wait until other processes on these GPUs have ended, then run it again.",
    ),
    "bad_token": Cause(
        "Hugging Face does not accept the token", "Set HF_TOKEN to a valid token, or unset it for a public model."
    ),
    "startup_timeout": Cause(
        "the engine was not ready in time",
        "See what it waits for, or raise engine.startup_timeout in the profile. Download the model beforehand with "
        "`hf download MODEL`.",
    ),
    "engine_died": Cause("the engine ended without being asked to", "See the log for what it did last."),
    "engine_stalled": Cause(
        "the engine is alive but makes no progress",
        "See the log for what it did last; raise the timeout if it is slow.",
    ),
    "live_lost": Cause(
        "the engine no longer answers commands to switch its settings",
        "See the engine's log; --no-live measures each setting on a start of its own.",
    ),
    "not_as_asked": Cause(
        "the engine runs another value than the one asked for",
        "Ask for the value that it can run, or leave the option out.",
    ),
    "not_stopped": Cause(
        "a process of the engine could not be ended", "End it by hand before the next start; it may hold the GPU."
    ),
    "auth": Cause(
        "the server refused the credentials",
        "Check the API key (--api-key-env), the base URL with or without /v1, and the model's id.",
    ),
    "not_openai": Cause(
        "the address is not that of an OpenAI-compatible server", "Check the URL: it has to be that of `vllm serve`."
    ),
    "refused": Cause("nobody listens at the address", "Check host, port and whether the server runs."),
    "timeout": Cause("the server did not answer in time", "See the server's log; raise workload.request_timeout."),
    "http_error": Cause("the server answered with an error", "See the message, and the server's log."),
    "too_many_failures": Cause("too many requests of the round failed", "See the first failure's message."),
    "client_limited": Cause("the client could not keep up with the load", "Lower the load, or run on a faster host."),
    "answers_differ": Cause(
        "answers were not as long as the load asks for",
        "Set workload.ignore_eos: false to measure answers that end where the model ends them, or take away what ends "
        "them before (a limit of the generation config, a gateway).",
    ),
    "prompts_differ": Cause(
        "prompts did not arrive as the load sends them", "Measure the engine itself, without what stands before it."
    ),
    "queue_grows": Cause(
        "the server cannot keep up with the rate of the load",
        "Lower workload.rate (of a trace, workload.speed), or give a concurrency.",
    ),
    "unknown": Cause("the engine failed for a reason that is not known here", "See the log."),
}
"""Every cause code that chunktune writes, with its plain sentence and hint."""


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE)


SIGNS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (
        "bad_token",
        _any(
            r"invalid credentials in authorization header",
            r"invalid user token",
            r"user access token .* (?:is )?(?:invalid|expired)",
            r"401 client error.*huggingface",
        ),
    ),
    ("shm_too_small", _any(r"no space left on device.*(?:/dev/shm|psm_|shm)", r"unable to (?:write to|open) .*shm")),
    ("disk_full", _any(r"no space left on device", r"\bENOSPC\b", r"disk quota exceeded")),
    (
        "driver_too_old",
        _any(
            r"NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient",
            r"unsupported display driver / cuda driver combination",
            r"error 803\b",
        ),
    ),
    ("gpu_fault", _any(r"uncorrectable ECC error", r"cudaErrorECCUncorrectable", r"GPU has fallen off the bus")),
    (
        "device_busy",
        _any(
            r"CUDA-capable device\(s\) is/are busy or unavailable",
            r"cudaErrorDevicesUnavailable",
            r"device is (?:busy|prohibited)",
            r"compute mode .*(?:prohibited|exclusive)",
        ),
    ),
    ("memory_profiling_failed", _any(r"error in memory profiling")),
    (
        "rendezvous_timeout",
        _any(r"timed out after \d+ seconds waiting for clients", r"DistStoreError", r"DistNetworkError"),
    ),
    (
        "nccl_failed",
        _any(r"\bNCCL (?:error|WARN)", r"ncclUnhandledCudaError", r"ncclSystemError", r"ncclInternalError"),
    ),
    ("gated_model", _any(r"gated repo", r"GatedRepoError", r"access to model .* is restricted")),
    (
        "missing_tokenizer",
        _any(
            r"couldn't instantiate the backend tokenizer",
            r"can't load tokenizer for",
            r"failed to load the tokenizer",
            r"unable to load vocabulary from file",
            r"tokenizer class \S+ does not exist",
        ),
    ),
    (
        "missing_model",
        _any(
            r"is not a local folder and is not a valid model identifier",
            r"RepositoryNotFoundError",
            r"LocalEntryNotFoundError",
            r"repo id must (?:use alphanumeric|be in the form)",
            r"does not appear to have a file named config\.json",
            r"can't load the configuration of",
            r"invalid repository id or local directory",
            r"couldn't connect to '?\S+'? to load (?:the|this) file",
            r"cannot find an appropriate cached snapshot",
            r"cannot find any model weights",
            r"RevisionNotFoundError",
        ),
    ),
    (
        "unsupported_model",
        _any(r"model architectures? .* (?:is|are) not supported", r"does not recognize this architecture"),
    ),
    (
        "no_free_memory",
        _any(
            r"free memory on device .* is less than desired",
            r"available memory on node .* is less than desired",
            r"less than desired GPU memory utilization",
        ),
    ),
    (
        "kv_cache_too_small",
        _any(
            r"cache is needed, which is larger than the available KV cache",
            r"KV cache is needed .* larger than .*available",
            r"no available memory for the cache blocks",
            r"is larger than the maximum number of tokens that can be stored in KV cache",
        ),
    ),
    (
        "cuda_oom",
        _any(
            r"(?:CUDA|HIP|XPU) out of memory",
            r"OutOfMemoryError",
            r"CUDA error: out of memory",
            r"cudaErrorMemoryAllocation",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"DefaultCPUAllocator: can't allocate memory",
        ),
    ),
    (
        "unsupported_gpu",
        _any(
            r"only supported on GPUs with compute capability",
            r"no kernel image is available",
            r"failed to infer device type",
            r"no CUDA GPUs are available",
            r"found no NVIDIA driver",
            r"not supported on .*compute capability",
            r"minimum capability: \d+",
        ),
    ),
    (
        "too_few_gpus",
        _any(
            r"world size \(?\d+\)? is larger than the number of available",
            r"device count .* less than .*world size",
            r"local[_ ]rank \d+ is out of bounds",
        ),
    ),
    ("port_in_use", _any(r"address already in use", r"EADDRINUSE")),
    (
        "block_size",
        _any(
            r"no common block size for",
            r"block[_ ]size.{0,40}is not supported",
            r"unsupported block[_ ]size",
            r"invalid block[_ ]size",
        ),
    ),
    (
        "plugin_failed",
        _any(
            r"No module named 'tuner",
            r"cannot import name '(?:ReuseBudget|Live)Scheduler'",
            r"ReuseBudgetScheduler",
            r"chunktune: (?:the reuse budget|live control) cannot run here",
        ),
    ),
    ("no_chat_template", _any(r"default chat template is no longer allowed", r"must provide a chat template")),
    (
        "invalid_combination",
        _any(
            r"must be greater than or equal to max_num_seqs",
            r"max_num_batched_tokens \(\d+\) is smaller than max_model_len",
            r"cannot be greater than (?:the )?max_\w+",
            r"block_size \(\d+\) must be (?:<=|less than or equal to) .*max_num_batched_tokens",
            r"max_num_batched_tokens .* must be (?:>=|at least|greater than or equal to) ",
            r"validation errors? for \w*Config",
        ),
    ),
)
"""Code and signs, more specific ones first; searched in 'Type: message' of one exception."""

CHUNK_BOUND: Final = re.compile(
    r"block_size \((?P<a>\d+)\) must be (?:<=|less than or equal to) .*max_num_batched_tokens"
    r"|max_num_batched_tokens(?: \(\d+\))? .*must be (?:>=|at least|greater than or equal to) (?:the )?"
    r"(?:attention )?(?:block[_ ]size|mamba block[_ ]size)?\s*\(?(?P<b>\d+)",
    re.IGNORECASE,
)
"""The smallest chunk that a hybrid model takes, read from its refusal of a smaller one."""

WRAPPERS: Final = _any(
    r"engine core initialization failed",
    r"EngineCore encountered an issue",
    r"EngineDeadError",
    r"WorkerProc initialization failed",
    r"worker failed with error",
    r"failed core proc",
    r"executor failed",
    r"^CancelledError",
    r"^BrokenPipeError",
    r"^ChildFailedError",
    r"^EOFError",
)
"""Exceptions that only say that another process failed."""
