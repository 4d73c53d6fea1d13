# The trainer for NVIDIA GPUs; docs/install.md says how to build it, why on this image, and what was tested.
# 26.06: Python 3.12, CUDA 13.3, PyTorch 2.13 as in uv.lock, Transformer Engine 2.16, NCCL 2.30.4.
FROM nvcr.io/nvidia/pytorch:26.06-py3 AS trainer

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# The image's constraint would pin all of its packages, in every environment.
ENV PIP_CONSTRAINT="" \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    UV_NO_CACHE=1

WORKDIR /opt/nemo-edo
COPY tools/uv tools/uv

# vLLM needs other versions of PyTorch and transformers; a server is a separate process anyway. --no-config: uv would
# apply the trainer's constraints of pyproject.toml. --exclude-newer: a later build gets the same packages.
# vLLM's NCCL becomes a link to the file that the trainer's PyTorch loads, because NCCL refuses ranks of two versions.
ARG VLLM_VERSION=0.33.0
RUN tools/uv venv --no-config /opt/vllm \
    && tools/uv pip install --no-config --python /opt/vllm/bin/python --exclude-newer 2026-11-20 \
        "vllm==${VLLM_VERSION}" \
    && nccl=$(python3 -c 'import torch; print(*{m.split()[-1] for m in open("/proc/self/maps") if "libnccl." in m})') \
    && ln -sf "${nccl:?PyTorch loads no libnccl}" /opt/vllm/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2

# An environment on top of the image's packages leaves what NVIDIA compiled as it is, and shows it to the trainer. Of
# the lock it gets all but torch, triton and numpy, and all that only these need (CUDA's libraries, NCCL).
COPY pyproject.toml uv.lock ./
RUN tools/uv venv --system-site-packages /opt/trainer \
    && tools/uv export --locked --quiet --no-hashes --no-header --no-annotate --no-default-groups --no-emit-project \
        --all-extras --prune torch --prune triton --prune numpy --prune cuda-bindings --output-file locked.txt \
    && tools/uv pip install --python /opt/trainer/bin/python --no-deps --requirements locked.txt
# Apptainer mounts the home, whose ~/.local would come before the image's packages.
ENV PATH=/opt/trainer/bin:$PATH PYTHONNOUSERSITE=1

COPY LICENSE README.md ./
COPY conf conf
COPY nemo_edo nemo_edo
RUN tools/uv pip install --python /opt/trainer/bin/python --no-deps . \
    && useradd --create-home --uid 10001 edo

# A build has no driver, and Transformer Engine opens libcuda.so.1 when it is imported: this one is the image's own, for
# hosts whose driver is older than its CUDA.
COPY tools/check_image.py tools/check_image.py
RUN LD_LIBRARY_PATH="/usr/local/cuda/compat/lib.real:${LD_LIBRARY_PATH:-}" python tools/check_image.py locked.txt

USER 10001
WORKDIR /home/edo
ENTRYPOINT ["nemo-edo"]

# Adds TensorRT-LLM's servers: docker build --target trtllm, with the release that generation/server_api.py names.
# It needs PyTorch 2.9.1 for CUDA 13.0; the image has the OpenMPI and CUDA toolkit that its installation needs.
# pip and not uv: NVIDIA's package on PyPI fetches the wheel while it is installed, which NVIDIA describes for pip.
FROM trainer AS trtllm
ARG TRTLLM_VERSION=1.3.0rc3
USER 0
RUN /opt/nemo-edo/tools/uv venv --no-config /opt/trtllm \
    && /usr/bin/python3 -m pip --python /opt/trtllm/bin/python install \
        --extra-index-url https://download.pytorch.org/whl/cu130 "torch==2.9.1+cu130" "tensorrt_llm==${TRTLLM_VERSION}"
USER 10001

# The default target.
FROM trainer AS default
