"""The GPU path on a machine without a GPU: Megatron with Transformer Engine's real Python code, over NCCL, on a device
that is pretended (machine/device.cpp). What it shows and what it cannot show: docs/architecture.md, "The rehearsal".

    .venv/bin/python -m pytest tests/rehearsal
    .venv/bin/python -m tests.rehearsal -m nemo_edo train --config-name quickstart

The second runs Python with a GPU, in this process and in those that it starts. The first call of either compiles the
device, into ~/.cache/nemo_edo/rehearsal, and installs Transformer Engine's Python code, into .venv-rehearsal
(prepare.py).

- ``machine/``: what Python has on its path there. ``sitecustomize`` loads the device before torch is imported, and
  ``pretended_cuda`` and ``pretended_nccl`` adapt torch.cuda and torch.distributed; nothing of nemo_edo is replaced.
  ``extensions/`` has the compiled parts of Transformer Engine and of apex, in torch.
- ``cases.py``: what is computed, once on the CPU and once here, in processes that a WorkerPool starts.
- ``test_rehearsal.py``: the device is as strict as CUDA, and the rest is compared with the CPU.
"""
