# The wheel and its locked dependencies are put into one virtual environment; the image holds nothing else of the build.
FROM python:3.12-slim AS build
WORKDIR /src
RUN ["python", "-m", "pip", "install", "--no-cache-dir", "uv==0.13.9"]
COPY pyproject.toml uv.lock README.md LICENSE* ./
COPY migrations migrations
COPY queuectl queuectl
RUN ["python", "-m", "uv", "build", "--wheel", "--out-dir", "/dist"]
RUN ["python", "-m", "uv", "export", "--locked", "--no-dev", "--extra", "uvloop", "--no-emit-project", "--output-file", "/dist/requirements.txt"]
RUN ["python", "-m", "venv", "--without-pip", "/opt/queuectl"]
RUN ["python", "-m", "uv", "pip", "install", "--python", "/opt/queuectl", "--no-cache", "--require-hashes", "--requirements", "/dist/requirements.txt"]
RUN ["python", "-m", "uv", "pip", "install", "--python", "/opt/queuectl", "--no-cache", "--no-deps", "--no-index", "--find-links", "/dist", "queuectl"]
RUN ["python", "-m", "compileall", "-q", "/opt/queuectl"]

FROM python:3.12-slim
COPY --from=build /opt/queuectl /opt/queuectl
ENV PATH=/opt/queuectl/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["queuectl"]
