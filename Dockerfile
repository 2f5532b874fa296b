# lora-rocm for AMD GPUs: docs/how-to/docker.md has the commands that build and run it. No GPU is needed for the build.
#
# The PyTorch packages bring their own ROCm, so the base image has none. Ubuntu 24.04 has Python 3.12.
FROM ubuntu:24.04

# The PyTorch and its index, as in lora_rocm/hardware/wheels.toml. These are for RX 7000, RX 9000, RX 6800 to 6950,
# Ryzen AI 300 and Instinct; the page has the arguments for other GPUs.
ARG TORCH_INDEX=pytorch
ARG TORCH=torch==2.13.0

# Triton compiles a small launcher in C for each kernel.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /lora-rocm
COPY pyproject.toml constraints.txt README.md CHANGELOG.md LICENSE ./
COPY locks locks
COPY scripts scripts
COPY recipes recipes
COPY lora_rocm lora_rocm
# Files that only their owner may read here would be unreadable for the user of the container.
RUN chmod -R a+rX . \
    && PIP_NO_CACHE_DIR=1 LORA_ROCM_TORCH_INDEX="$TORCH_INDEX" LORA_ROCM_TORCH="$TORCH" python3 scripts/install.py

# Any user can run the image, also one without a name: torch asks for the name. Downloads, compiled kernels and results of
# the self-test are below HOME, so it is a volume.
RUN mkdir --mode=1777 /cache /work
ENV HOME=/cache USER=user PATH=/lora-rocm/.venv/bin:$PATH
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["lora-rocm"]
CMD ["--help"]
