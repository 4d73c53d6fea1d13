# The trainer for NVIDIA GPUs; docs/dockerfile.md says how to build it, and what has been checked of it.
# 25.12: PyTorch 2.10, Transformer Engine 2.10, CUDA 13.1, Python 3.12. Megatron-Bridge 0.3 takes Transformer Engine
# 2.10 to 2.12, megatron-core 0.16 takes 2.9 to 2.11.
FROM nvcr.io/nvidia/pytorch:25.12-py3 AS trainer

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The image's own constraint would hold every package of it; only its compiled GPU stack has to stay (image.txt).
ENV PIP_CONSTRAINT="" \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# vLLM brings a PyTorch and a transformers of its own; a server is another process anyhow.
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

USER 10001
WORKDIR /home/edo
ENTRYPOINT ["nemo-edo"]

# With TensorRT-LLM's servers as well: docker build --target trtllm. The release that generation/trtllm_server.py names.
# It wants PyTorch 2.9.1 of CUDA 13.0; the image has OpenMPI and the CUDA 13.1 toolkit that its installation asks for.
FROM trainer AS trtllm
ARG TRTLLM_VERSION=1.2.1
USER 0
RUN python3 -m venv --without-pip /opt/trtllm \
    && python3 -m pip --python /opt/trtllm/bin/python install \
        --extra-index-url https://download.pytorch.org/whl/cu130 "torch==2.9.1+cu130" "tensorrt_llm==${TRTLLM_VERSION}"
USER 10001

# What is built where no target is named.
FROM trainer AS default
