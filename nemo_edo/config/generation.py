"""Where responses come from: the trainer's own process, or servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional, Union

from nemo_edo.config.checks import one_of, positive, require, server_url

IN_PROCESS = "megatron"
AUTO = "auto"
BACKENDS = (IN_PROCESS, "vllm", "trtllm")
TRANSPORTS = ("disk", "nccl")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
RELAUNCHED = "none with generation.backend trtllm: its servers take new weights by a restart, so the run starts them"


@dataclass
class ServersConfig:
    """The servers that responses come from with ``generation.backend`` vllm or trtllm."""

    urls: list[str] = field(default_factory=list)
    """Running servers, such as http://node7:8000. Empty: the run starts its own on this machine."""
    api_key_variable: Optional[str] = None
    """The environment variable that holds the key of the servers at ``urls``; null: they ask for none."""
    launched: bool = False
    """Whether ``nemo-edo launch`` started the servers at ``urls``; launch sets this. They then renew a tied output
    layer
    with the other weights, which vLLM by itself does not on a CPU."""
    replicas: int = 1
    """Servers that the run starts, each with the whole model."""
    python: Optional[str] = None
    """The interpreter that has the server; null: .venv-vllm/bin/python (of ``make vllm-env``) or /opt/vllm/bin/python
    (of the container) where it exists, otherwise the run's."""
    host: str = "127.0.0.1"
    """The address that the run's own servers listen on. Other machines can reach them unless it is a loopback
    address."""
    tensor_parallel_size: int = 1
    """GPUs of each replica."""
    first_gpu: Optional[int] = None
    """The first GPU of the replicas. null: with placement apart the first after the GPUs of the trainer's processes on
    this machine, otherwise 0."""
    dtype: Optional[str] = None
    """float32, bfloat16 or float16; null: as the trainer computes (bfloat16 with FP8)."""
    memory_share: float = 0.85
    """Share of a GPU's memory that a replica takes."""
    cpu_cache_gb: int = 1
    """GiB of a replica's KV cache on a machine without GPUs."""
    threads: Optional[int] = None
    """CPU threads of a replica on a machine without GPUs; null: its share of the machine's cores."""
    arguments: list[str] = field(default_factory=list)
    """Further command-line arguments of the server."""
    max_in_flight: int = 256
    """Requests in flight on a replica at a time."""
    start_limit_s: float = 900.0
    """Seconds that a server may take until it is ready: a large model loads for minutes."""
    request_limit_s: float = 600.0
    """Seconds that an answer may take; then the request goes to another replica, or to the same one again."""
    health_limit_s: float = 30.0
    """Seconds without an answer to a health check after which a server counts as hanging."""
    attempts: int = 20
    """Times that one request is tried before the run gives up."""
    restarts: int = 5
    """Consecutive restarts (or waits), without an answer in between, before a server is left out."""
    backoff_s: float = 0.25
    """The longest wait before a request's second attempt; it doubles with each one, and the wait is a random share."""
    backoff_limit_s: float = 20.0
    """Upper bound of the wait."""
    retry_after_limit_s: float = 60.0
    """The longest that a server which answers with Retry-After is left without requests."""

    def __post_init__(self) -> None:
        section = "generation.servers"
        positive(self, section, "replicas", "tensor_parallel_size", "max_in_flight", "cpu_cache_gb")
        positive(self, section, "start_limit_s", "request_limit_s", "health_limit_s", "attempts")
        positive(self, section, "backoff_s", "backoff_limit_s", "retry_after_limit_s")
        for name in ("restarts", "first_gpu"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"{section}.{name}", value, "a number of at least 0")
        require(0 < self.memory_share < 1, f"{section}.memory_share", self.memory_share, "a number in (0, 1)")
        if self.threads is not None:
            positive(self, section, "threads")
        if self.dtype is not None:
            one_of(f"{section}.dtype", self.dtype, ("float32", "bfloat16", "float16"))
        for url in self.urls:
            server_url(f"{section}.urls", url, "http://node7:8000")
        repeated = len(self.urls) != len({url.rstrip("/") for url in self.urls})
        require(not repeated, f"{section}.urls", list(self.urls), "each server once")
        if self.api_key_variable is not None and not self.urls:
            raise ValueError(f"{section}.api_key_variable is for servers at urls; a run's own servers get a new key")


@dataclass
class RefitConfig:
    """The refit of servers. In process there is none: engine and trainer share the weights."""

    transport: str = "disk"
    """disk: a folder of safetensors files that the servers read again; nccl: from GPU to GPU, through vLLM's weight
    transfer."""
    folder: Optional[str] = None
    """With disk: where these folders are, on a file system that every server sees under the same path. null: this
    machine's shared memory (/dev/shm) for servers that the run starts, the run's own folder for those at
    servers.urls."""
    nccl_library: Optional[str] = None
    """With nccl: the libnccl.so.2 that trainer and servers load, as NCCL refuses ranks of different versions. null:
    that of the servers' environment (servers.python)."""
    lora: str = "merged"
    """With lora.rank above 0. merged: the whole model with its adapters merged, each time; adapter: only the adapters,
    after the base weights were sent once."""
    attempts: int = 3
    """Attempts to send a replica the weights before it counts as failed: a replica that the run started is then
    restarted with them, any other is left out."""
    limit_s: float = 600.0
    """Seconds that a replica may take to load them."""

    def __post_init__(self) -> None:
        section = "generation.refit"
        one_of(f"{section}.transport", self.transport, TRANSPORTS)
        one_of(f"{section}.lora", self.lora, ("merged", "adapter"))
        positive(self, section, "attempts", "limit_s")
        if self.transport == "nccl" and self.lora == "adapter":
            raise ValueError(f"{section}.lora is 'adapter', expected merged with {section}.transport nccl")


@dataclass
class GenerationConfig:
    backend: str = IN_PROCESS
    """megatron: in the trainer's own process. vllm, trtllm: servers (``generation.servers``)."""
    max_batch_size: Union[int, str] = AUTO
    """Sequences decoded at a time at most on one data-parallel rank, in process; with torch's attention waiting ones
    take the places of those that have ended. auto: as many as the memory that is free when generation begins has room
    for, on a CPU 512 at most."""
    part_size: int = 2048
    """Responses of a collection that are generated, scored and written to disk at a time: what a killed run loses, at
    most."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    placement: str = "apart"
    """apart: servers have separate GPUs; shared: the trainer's, which they give back while it trains (vLLM's sleep
    mode)."""
    one_step_off: bool = False
    """Generate the next iteration's responses while this one trains, from the policy that this one began with. Needs
    servers, and importance correction (grpo.sampler_correction)."""
    stale: str = "refuse"
    """Responses of an earlier policy than the iteration asks for. refuse: an error; correct: they are trained on with
    importance correction (grpo.sampler_correction)."""

    def __post_init__(self) -> None:
        one_of("generation.backend", self.backend, BACKENDS)
        positive(self, "generation", "part_size")
        rows = self.max_batch_size
        fits = rows == AUTO or (isinstance(rows, int) and rows > 0)
        require(fits, "generation.max_batch_size", rows, f"a number above 0 or {AUTO}")
        self._check_layout()

    def _check_layout(self) -> None:
        one_of("generation.placement", self.placement, ("apart", "shared"))
        one_of("generation.stale", self.stale, ("refuse", "correct"))
        one_process = f"with generation.backend {IN_PROCESS}: trainer and engine are one process, on the same weights"
        ahead, placement = self.one_step_off, self.placement
        require(self.is_served or not ahead, "generation.one_step_off", ahead, f"false {one_process}")
        require(self.is_served or placement == "apart", "generation.placement", placement, f"apart {one_process}")
        asleep = "false with generation.placement shared: the servers sleep while the trainer trains"
        require(not ahead or placement == "apart", "generation.one_step_off", ahead, asleep)
        own = "disk with generation.placement shared: NCCL refuses two processes on one GPU"
        disk = placement == "apart" or self.refit.transport == "disk"
        require(disk, "generation.refit.transport", self.refit.transport, own)
        if self.backend == "trtllm":
            refit, servers = self.refit, self.servers
            local = "a loopback address with generation.backend trtllm: its server asks for no key"
            require(servers.host in LOOPBACK, "generation.servers.host", servers.host, local)
            of_folder = "null with generation.backend trtllm: it computes in the model folder's data type"
            require(servers.dtype is None, "generation.servers.dtype", servers.dtype, of_folder)
            require(placement == "apart", "generation.placement", placement, "apart with generation.backend trtllm")
            for name, only in (("transport", "disk"), ("lora", "merged")):
                value = getattr(refit, name)
                require(value == only, f"generation.refit.{name}", value, f"{only} with generation.backend trtllm")
            require(not self.servers.urls, "generation.servers.urls", self.servers.urls, RELAUNCHED)

    @property
    def is_served(self) -> bool:
        return self.backend != IN_PROCESS
