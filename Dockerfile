# vLLM's own image with chunktune beside it: docker build --tag chunktune .
ARG VLLM_TAG=v0.32.0
FROM vllm/vllm-openai:${VLLM_TAG}

WORKDIR /opt/chunktune
COPY pyproject.toml README.md LICENSE ./
COPY tuner ./tuner
COPY profiles ./profiles
# Nothing that vLLM was built with may change: what is installed already is a constraint, so a conflict fails the build.
RUN python3 -m pip list --format=freeze >/tmp/installed.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt . \
    && rm /tmp/installed.txt \
    && useradd --create-home --uid 1000 chunktune \
    && install --directory --owner=chunktune /results /cache

ENV HF_HOME=/cache/huggingface
USER 1000
WORKDIR /results
ENTRYPOINT ["chunktune"]
CMD ["--help"]
