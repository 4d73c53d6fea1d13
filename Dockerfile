# syntax=docker/dockerfile:1
# The trainer for NVIDIA GPUs; docs/install.md says how to build it and what was tested.
# Megatron-Bridge's own image is built on this one. It has Python 3.12, and PyTorch, Transformer Engine, apex and
# flash-attention that were compiled for each other.
FROM nvcr.io/nvidia/pytorch:26.06-py3 AS trainer

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The image's constraint would pin all of its packages; only its compiled GPU stack must stay.
ENV PIP_CONSTRAINT="" \
    UV_NO_CACHE=1 \
    UV_PROJECT_ENVIRONMENT=/opt/trainer
ARG UV_VERSION=0.13.9
RUN python3 -m pip install --no-cache-dir "uv==${UV_VERSION}"

# vLLM needs another PyTorch and transformers; a server is a separate process anyway. Its NCCL may differ from the
# trainer's: a refit uses this file at both ends, and torch's own communicators keep the image's.
ARG VLLM_VERSION=0.33.0
RUN uv venv --python python3 /opt/vllm \
    && uv pip install --python /opt/vllm/bin/python "vllm==${VLLM_VERSION}"

# The lock's packages on top of the image's, which the environment sees. What the image compiled is not installed.
WORKDIR /opt/nemo-edo
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY conf conf
COPY nemo_edo nemo_edo
RUN compiled=$(grep -oE '^name = "(torch|triton|numpy|cuda-[a-z]+|nvidia-[a-z0-9-]+)"' uv.lock | cut -d'"' -f2 | sort -u) \
    && uv venv --python python3 --system-site-packages /opt/trainer \
    && uv sync --locked --no-editable --extra trainer --extra bridge \
        $(printf -- '--no-install-package %s ' ${compiled}) \
    && useradd --create-home --uid 10001 edo
ENV PATH="/opt/trainer/bin:${PATH}"

# What could be absent without an error until a job runs; none of it needs a GPU.
RUN python - <<'CHECK'
import importlib.metadata as installed
import tomllib

import apex, flash_attn, numpy, torch, transformer_engine.pytorch  # noqa: E401, F401
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
import megatron.bridge  # noqa: F401
from nemo_edo.refit.libnccl import common_library
from nemo_edo.utils.processes import package_file

assert HAVE_TE, "megatron-core does not see Transformer Engine"
assert float(torch.from_numpy(numpy.ones(2)).sum()) == 2.0, "torch was compiled for another NumPy"
assert "/opt/trainer" not in torch.__file__, "the image's torch was replaced"
locked = {one["name"]: one["version"] for one in tomllib.load(open("uv.lock", "rb"))["package"]}
for name in ("megatron-core", "megatron-bridge", "nemo-toolkit", "transformers", "hydra-core", "omegaconf"):
    assert installed.version(name) == locked[name], f"{name} {installed.version(name)}, the lock has {locked[name]}"
print("NCCL of a refit:", common_library(package_file("/opt/vllm/bin/python", "nvidia.nccl", "lib/libnccl.so.2")))
CHECK

USER 10001
WORKDIR /home/edo
ENTRYPOINT ["nemo-edo"]

# Adds TensorRT-LLM's servers: docker build --target trtllm, with the release that generation/trtllm_server.py names.
# It needs PyTorch 2.9.1 for CUDA 13.0; the image has the OpenMPI and CUDA toolkit that its installation needs.
FROM trainer AS trtllm
ARG TRTLLM_VERSION=1.2.1
USER 0
RUN uv venv --python python3 /opt/trtllm \
    && uv pip install --python /opt/trtllm/bin/python --index-strategy unsafe-best-match \
        --extra-index-url https://download.pytorch.org/whl/cu130 "torch==2.9.1+cu130" "tensorrt_llm==${TRTLLM_VERSION}"
USER 10001

# The default target.
FROM trainer AS default
