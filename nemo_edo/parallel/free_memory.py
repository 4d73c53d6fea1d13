"""The memory that is free for tensors, of every rank."""

import os

import torch

from nemo_edo.utils.memory import available_bytes


def free_gpu_memory() -> list[int]:
    """Free bytes on each rank's GPU, once the ranks have released their unused memory. All ranks call it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.distributed.barrier()
    return of_each_rank(torch.cuda.mem_get_info()[0], torch.device("cuda"))


def free_host_memory() -> list[int]:
    """Each rank's even share of its machine's available memory, in bytes. All ranks call it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", torch.distributed.get_world_size()))
    return of_each_rank(available_bytes() // ranks, torch.device("cpu"))


def of_each_rank(number: int, device: torch.device) -> list[int]:
    """The ranks' numbers. All ranks call it; device: one that the process group's backend communicates on."""
    own = torch.tensor([number], device=device)
    numbers = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(numbers, own)
    return [int(each) for each in numbers]
