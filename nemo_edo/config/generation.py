"""Where responses come from: the trainer's own process, or servers."""

from dataclasses import dataclass, field
from typing import Annotated, Optional, Union

from nemo_edo.config.checks import NonNegativeInt, Positive, PositiveInt, Rules, Section, ServerUrl, one_of, within

IN_PROCESS = "megatron"
AUTO = "auto"
PLAIN = "openai"


@dataclass
class ServersConfig(Section):
    """The servers that responses come from with ``generation.backend`` vllm or trtllm."""

    urls: list[ServerUrl] = field(default_factory=list)
    """Running servers, such as http://node7:8000. Empty: the run starts its own on this machine."""
    api_key_variable: Optional[str] = None
    """The environment variable that holds the key of the servers at ``urls``; null: they ask for none."""
    model: Optional[str] = None
    """With generation.backend openai: the model's name in requests; null: the first that the endpoint lists."""
    chat: bool = False
    """With generation.backend openai: send messages to the chat endpoint, which applies a chat template itself, instead
    of the whole prompt as text to the completions endpoint."""
    token_limit: Annotated[str, one_of("max_tokens", "max_completion_tokens")] = "max_tokens"
    """With generation.backend openai: name of the limit of a response in requests; max_completion_tokens for OpenAI's
    reasoning models, which count their thoughts in it."""
    launched: bool = False
    """Whether ``nemo-edo launch`` started the servers at ``urls``; launch sets this. They then renew a tied output
    layer with the other weights, which vLLM by itself does not on a CPU."""
    replicas: PositiveInt = 1  # Servers that the run starts, each with the whole model.
    python: Optional[str] = None
    """The interpreter that has the server; null: .venv-vllm/bin/python (of ``make vllm-env``) or /opt/vllm/bin/python
    (of the container) where it exists, otherwise the run's."""
    host: str = "127.0.0.1"
    """The address that the run's own servers listen on. Other machines reach them unless it is a loopback address."""
    tensor_parallel_size: PositiveInt = 1  # GPUs of each replica.
    first_gpu: Optional[NonNegativeInt] = None
    """The first GPU of the replicas. null: with placement apart the first after the GPUs of the trainer's processes on
    this machine, otherwise 0."""
    dtype: Optional[Annotated[str, one_of("float32", "bfloat16", "float16")]] = None
    """float32, bfloat16 or float16; null: as the trainer computes (bfloat16 with FP8)."""
    memory_share: Annotated[float, within(0, 1, "()")] = 0.85  # Share of a GPU's memory that a replica takes.
    cpu_cache_gb: PositiveInt = 1  # GiB of a replica's KV cache on a machine without GPUs.
    threads: Optional[PositiveInt] = None  # CPU threads of a replica without GPUs; null: its share of the cores.
    arguments: list[str] = field(default_factory=list)  # Further command-line arguments of the server.
    max_in_flight: PositiveInt = 256  # Requests in flight on a replica at a time.
    start_limit_s: Positive = 900.0  # Seconds until a server is ready, at most: a large model loads for minutes.
    request_limit_s: Optional[Positive] = None
    """Seconds that an answer may take; then the request goes to another replica, or to the same one again. null: 300,
    and for each token that the request allows 0.1 or, once answers are there, four times what theirs took."""
    health_limit_s: Positive = 30.0  # Seconds without an answer to a health check until a server counts as hanging.
    attempts: PositiveInt = 20  # Times that one request is tried before the run gives up.
    restarts: NonNegativeInt = 5  # Restarts (or waits) without an answer in between before a server is left out.
    backoff_s: Positive = 0.25
    """The longest wait before a request's second attempt; it doubles with each one, and the wait is a random share."""
    backoff_limit_s: Positive = 20.0  # Upper bound of the wait.
    retry_after_limit_s: Positive = 60.0  # The longest that a server with a Retry-After is left without requests.

    def rules(self) -> Rules:
        yield len(self.urls) == len({url.rstrip("/") for url in self.urls}), "urls", "each server once"
        own = "without urls: a run's own servers get a new key"
        yield from self.only_if(bool(self.urls), own, "api_key_variable")


@dataclass
class RefitConfig(Section):
    """The refit of servers. In process there is none: engine and trainer share the weights."""

    transport: Annotated[str, one_of("disk", "nccl")] = "disk"
    """disk: a folder of safetensors that the servers read again; nccl: from GPU to GPU, by vLLM's weight transfer."""
    folder: Optional[str] = None
    """With disk: where these folders are, on a file system that every server sees under the same path. null: /dev/shm
    for servers that the run starts, the run's own folder for those at servers.urls."""
    nccl_library: Optional[str] = None
    """With nccl: the libnccl.so.2 that trainer and servers load, as NCCL refuses ranks of different versions. null:
    that of the servers' environment (servers.python)."""
    bucket_mib: PositiveInt = 1024
    """With nccl: a bucket of weights, ending with the one that exceeds it. Rank 0 has one, a server's worker two."""
    lora: Annotated[str, one_of("merged", "adapter")] = "merged"
    """With lora.rank above 0. merged: the whole model with its adapters merged, each time; adapter: only the adapters,
    after the base weights were sent once."""
    attempts: PositiveInt = 3
    """Attempts to send a replica the weights before it counts as failed: a replica that the run started is then
    restarted with them, any other is left out."""
    limit_s: Positive = 600.0  # Seconds that a replica may take to load them.

    def rules(self) -> Rules:
        yield from self.only_if(self.transport != "nccl", "with generation.refit.transport nccl", "lora")


@dataclass
class GenerationConfig(Section):
    backend: Annotated[str, one_of(IN_PROCESS, "vllm", "trtllm", PLAIN)] = IN_PROCESS
    """megatron: in the trainer's own process. vllm, trtllm: servers (``generation.servers``). openai: any endpoint of
    OpenAI's API at servers.urls, for what needs no log-probabilities: evaluation and search of a model."""
    max_batch_size: Union[int, str] = AUTO
    """Sequences decoded at a time at most on one data-parallel rank, in process; with torch's attention waiting ones
    take the places of those that have ended. auto: as many as the memory that is free when generation begins has room
    for, on a CPU 512 at most."""
    part_size: PositiveInt = 2048
    """Responses that are scored and written to disk at a time, at most, but for those to one prompt that a reward
    function compares; in process they are also generated in parts of so many, between which a run may stop. A killed
    run loses what has not ended, and the last minute's responses."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    placement: Annotated[str, one_of("apart", "shared")] = "apart"
    """apart: servers have separate GPUs; shared: the trainer's, given back while it trains (vLLM's sleep mode)."""
    one_step_off: bool = False
    """Generate the next iteration's responses while this one trains, from the policy that this one began with. Needs
    servers, and importance correction (grpo.sampler_correction)."""
    stale: Annotated[str, one_of("refuse", "correct")] = "refuse"
    """Responses of an earlier policy than the iteration asks for. refuse: an error; correct: they are trained on with
    importance correction (grpo.sampler_correction)."""

    routing_replay: bool = False
    """For a mixture of experts, in process or with vLLM: keep the experts that the sampler's routers chose for each
    token, and send it to the same ones in the trainer's passes (the reference routes for itself)."""

    def rules(self) -> Rules:
        rows, apart = self.max_batch_size, self.placement == "apart"
        yield rows == AUTO or (isinstance(rows, int) and rows > 0), "max_batch_size", f"a number above 0 or {AUTO}"
        one_process = f"with generation.backend {IN_PROCESS}: trainer and engine are one process, on the same weights"
        yield from self.only_if(self.is_served, one_process, "one_step_off", "placement")
        returned = f"with generation.backend {self.backend}: its answers have no experts"
        yield from self.only_if(self.backend in (IN_PROCESS, "vllm"), returned, "routing_replay")
        endpoint = "an endpoint's URL with backend openai, which cannot train: megatron, vllm and trtllm can"
        yield self.backend != PLAIN or bool(self.servers.urls), "servers.urls", endpoint
        plain = f"with generation.backend {self.backend}"
        yield from self.only_if(self.backend == PLAIN, plain, "servers.model", "servers.chat", "servers.token_limit")
        asleep = "with generation.placement shared: the servers sleep while the trainer trains"
        yield from self.only_if(apart, asleep, "one_step_off")
        one_gpu = "with generation.placement shared: NCCL refuses two processes on one GPU"
        yield from self.only_if(apart, one_gpu, "refit.transport")
        other, with_it = self.backend != "trtllm", "with generation.backend trtllm"
        host = f"a loopback address {with_it}: its server asks for no key"
        yield other or self.servers.host in ("127.0.0.1", "localhost", "::1"), "servers.host", host
        yield from self.only_if(other, f"{with_it}: it computes in the model folder's data type", "servers.dtype")
        yield from self.only_if(other, with_it, "placement", "refit.transport", "refit.lora")
        restarted = f"{with_it}: its servers take new weights by a restart, so the run starts them"
        yield from self.only_if(other, restarted, "servers.urls")

    @property
    def is_served(self) -> bool:
        return self.backend != IN_PROCESS
