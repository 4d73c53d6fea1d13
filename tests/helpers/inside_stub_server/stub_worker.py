"""Loaded by the workers of a vLLM server on a CPU, in its environment: their weight transfer through the stub of NCCL.

What is replaced is CUDA's alone: the device, the stream, and the order that a stream gives (a broadcast has ended when
the weight is used). Routes, worker, transfer engine, wrapper of NCCL and loading are vLLM's own.
"""

import contextlib
import ctypes
import os
import time

import torch
from tied_head import TiedHead
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class Stream:
    cuda_stream = 7

    @staticmethod
    def synchronize():
        library = ctypes.CDLL(os.environ["VLLM_NCCL_SO_PATH"])
        while not library.stub_stream_idle(Stream.cuda_stream):
            time.sleep(1e-4)


def ended(collective):
    """It has ended when the call returns: on a CPU memory is not freed in a stream's order."""

    def call(*args, **kwargs):
        kept = collective(*args, **kwargs)
        Stream.synchronize()
        return kept

    return call


def all_reduce(self, tensor, own=pynccl.PyNcclCommunicator.all_reduce):
    out = torch.empty_like(tensor)  # its own would be freed before the end
    return ended(own)(self, tensor, out)


def finish_weight_update(self, own=NCCLWeightTransferEngine.finish_weight_update):
    own(self)
    if self.model.config.tie_word_embeddings:  # as TiedHead does after a reload
        self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)


torch.accelerator.current_device_index = lambda: "cpu"
torch.accelerator.device_index = contextlib.nullcontext
packed_tensor._get_streams = lambda device, count: (Stream,) * count
torch.cuda.stream = contextlib.nullcontext
torch.cuda.current_stream = pynccl.current_stream = lambda device=None: Stream
pynccl.PyNcclCommunicator.broadcast = ended(pynccl.PyNcclCommunicator.broadcast)
pynccl.PyNcclCommunicator.all_reduce = all_reduce
NCCLWeightTransferEngine.finish_weight_update = finish_weight_update


class StubWorker(TiedHead):
    """A worker extension."""
