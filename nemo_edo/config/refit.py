"""How trained weights reach the servers that responses come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from nemo_edo.config.checks import one_of, positive

TRANSPORTS = ("disk", "nccl")


@dataclass
class RefitConfig:
    """The refit of servers. In process there is none: engine and trainer share the weights."""

    transport: str = "disk"
    """disk: a folder of safetensors files that the servers read again; nccl: from GPU to GPU, through vLLM's weight
    transfer."""
    folder: Optional[str] = None
    """Of disk: where these folders stand, on a file system that every server sees under the same path. null: this
    machine's shared memory (/dev/shm) for servers that the run starts, the run's own folder for those at
    servers.urls."""
    lora: str = "merged"
    """With lora.rank above 0. merged: the whole model with its adapters merged, each time; adapter: the adapters alone,
    after the weights beside them were sent once."""
    attempts: int = 3
    """Times that a replica is asked to take the weights before it counts as failed: one that the run started is then
    started again with them, another one is left out."""
    limit_s: float = 600.0
    """Seconds that a replica may take to load them."""

    def __post_init__(self) -> None:
        section = "generation.refit"
        one_of(f"{section}.transport", self.transport, TRANSPORTS)
        one_of(f"{section}.lora", self.lora, ("merged", "adapter"))
        positive(self, section, "attempts", "limit_s")
        if self.transport == "nccl" and self.lora == "adapter":
            raise ValueError(f"{section}.lora is 'adapter', expected merged with {section}.transport nccl")
