# vLLM's own image with chunktune beside it: docker build --tag chunktune .
ARG VLLM_TAG=v0.32.0
FROM vllm/vllm-openai:${VLLM_TAG}

WORKDIR /opt/chunktune
COPY pyproject.toml README.md LICENSE ./
COPY tuner ./tuner
COPY profiles ./profiles
# Nothing that vLLM was built with may change: what is installed already is a constraint, so a conflict fails the build.
# vLLM is in the system's Python, where Ubuntu's pip installs only if told so.
RUN python3 -m pip list --format=freeze >/tmp/installed.txt \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --constraint /tmp/installed.txt . \
    && rm /tmp/installed.txt \
    && mkdir --mode=1777 /cache /results

# Any user may run it: vLLM, PyTorch and Triton keep their caches under HOME, and PyTorch asks for the user's name,
# which a user id without an account has only here. 2000 is the account `vllm` of this image.
ENV HOME=/cache USER=chunktune HF_HOME=/cache/huggingface
USER 2000
WORKDIR /results
ENTRYPOINT ["chunktune"]
CMD ["--help"]
