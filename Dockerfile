# The trainer for NVIDIA GPUs; docs/install.md says how to build it and what was tested.
# 25.12: PyTorch 2.10, Transformer Engine 2.10, CUDA 13.1, Python 3.12. Megatron-Bridge 0.3 supports Transformer
# Engine 2.10 to 2.12, megatron-core 0.16 supports 2.9 to 2.11.
FROM nvcr.io/nvidia/pytorch:25.12-py3 AS trainer

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The image's constraint would pin all of its packages; only its compiled GPU stack must stay (image.txt).
ENV PIP_CONSTRAINT="" \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# vLLM needs other versions of PyTorch and transformers; a server is a separate process anyway.
ARG VLLM_VERSION=0.32.0
RUN python3 -m venv --without-pip /opt/vllm \
    && python3 -m pip --python /opt/vllm/bin/python install "vllm==${VLLM_VERSION}"

WORKDIR /opt/nemo-edo
COPY requirements requirements
RUN python3 -m pip list --format=freeze \
        | grep -iE '^(torch|torchvision|triton|pytorch.triton|transformer.engine|apex|flash.attn|(nvidia|cuda)-.*)==' \
        > image.txt \
    && grep -vE '^(torch|triton|cuda-[a-z]+|setuptools)==' requirements/base.txt > pinned.txt \
    && python3 -m pip install -c image.txt -r pinned.txt \
    && python3 -m pip install --no-deps -r requirements/no-deps.txt

COPY pyproject.toml LICENSE ./
COPY conf conf
COPY nemo_edo nemo_edo
RUN python3 -m pip install --no-deps . \
    && useradd --create-home --uid 10001 edo

# What could be absent without an error until a job runs: Transformer Engine, without which training would use other
# kernels, and the NCCL that the trainer shares with vLLM's servers. Neither needs a GPU.
RUN python3 -c 'from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE; import transformer_engine.pytorch, onnxscript; assert HAVE_TE' \
    && python3 -c 'from nemo_edo.refit.libnccl import Library; from nemo_edo.utils.processes import package_file; print(Library(package_file("/opt/vllm/bin/python", "nvidia.nccl", "lib/libnccl.so.2")))'

USER 10001
WORKDIR /home/edo
ENTRYPOINT ["nemo-edo"]

# Adds TensorRT-LLM's servers: docker build --target trtllm, with the release that generation/trtllm_server.py names.
# It needs PyTorch 2.9.1 for CUDA 13.0; the image has the OpenMPI and CUDA 13.1 toolkit that its installation needs.
FROM trainer AS trtllm
ARG TRTLLM_VERSION=1.2.1
USER 0
RUN python3 -m venv --without-pip /opt/trtllm \
    && python3 -m pip --python /opt/trtllm/bin/python install \
        --extra-index-url https://download.pytorch.org/whl/cu130 "torch==2.9.1+cu130" "tensorrt_llm==${TRTLLM_VERSION}"
USER 10001

# The default target.
FROM trainer AS default
