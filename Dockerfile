# A server of a checkpoint; docs/serving.md has the commands.
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libjpeg-dev
COPY . /vit_jax
RUN pip wheel --no-deps --wheel-dir=/wheels /vit_jax

FROM python:3.13-slim
RUN apt-get update && apt-get install -y --no-install-recommends libjpeg62-turbo && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[serve]" && rm -r /wheels && useradd --create-home serve
USER serve
EXPOSE 8000
HEALTHCHECK --start-period=120s --timeout=10s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://localhost:8000/health', timeout=5)"]
ENTRYPOINT ["vit-jax", "serve", "--host=0.0.0.0"]
