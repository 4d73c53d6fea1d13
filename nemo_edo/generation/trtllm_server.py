"""TensorRT-LLM's OpenAI-compatible server, ``trtllm-serve``, with its PyTorch backend (release 1.2.1).

Written from its sources, but never run, as it needs a GPU. It loads weights only when it starts, so a refit restarts
it. It supports no key, so it listens on loopback only. Its log-probabilities are before the temperature, so the config
allows temperature 1 only. Its precision is that of the model folder's ``config.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_edo.generation.server_api import ServerAPI, server_python


class TRTLLM(ServerAPI):
    backend = "trtllm"
    package = "tensorrt_llm"
    install = "pip install tensorrt_llm==1.2.1 in a separate environment, on a machine with GPUs"

    def model_name(self, model: Path) -> str:
        return model.name

    def command(self, model: Path, port: int) -> list[str]:
        options = {
            "backend": "pytorch",
            "host": self.settings.host,
            "port": str(port),
            "max_seq_len": str(self.max_length),
            "max_batch_size": str(self.settings.max_in_flight),
            "tensor_parallel_size": str(len(self.gpus)),
            "kv_cache_free_gpu_memory_fraction": str(self.settings.memory_share),
        }
        command = [server_python(self.settings), "-m", "tensorrt_llm.commands.serve", "serve", str(model)]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        return [*command, *self.settings.arguments]

    def environment(self, key: str) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": self.visible_devices, "HF_HUB_OFFLINE": "1"}

    @staticmethod
    def extra_fields(stop_ids: Sequence[int]) -> dict[str, Any]:
        # Answers have token ids only without detokenization. Stop tokens are stop words here, and cut off by default.
        stop = {"ignore_eos": True, "stop_token_ids": list(stop_ids), "include_stop_str_in_output": True}
        return {"logprobs": 1, "detokenize": False, **stop}
