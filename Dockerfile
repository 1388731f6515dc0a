# Targets:
#   train        the scheduled job:  docker build --target train -t train .
#                                    docker run --rm --stop-timeout 120 -v "$PWD:/work" train run configs/movie_reviews.toml
#                with a GPU:         docker build --target train --build-arg REQUIREMENTS=requirements-gpu.txt -t train-gpu .
#                                    docker run --gpus all ...
#   serving-cpu  TensorFlow Serving: docker build --target serving-cpu -t serving .
#                                    docker run --rm -p 8500:8500 -p 8501:8501 -v "$PWD/models:/models:ro" \
#                                      -e MODEL_NAME=movie-reviews serving
#   serving-gpu  the same on TensorFlow Serving's GPU image.
#
# NOT BUILT where this was written: there was no Docker engine. What was checked instead: the train target's
# requirements.txt installs and passes `pip check` on Python 3.11; its PYTHONPATH and PYTHONSAFEPATH find the code from
# another folder; requirements-gpu.txt resolves (not installed); the flags and the entrypoint below are those in
# TensorFlow Serving's source; batching.config parses as its BatchingParameters message.

# The server of the TensorFlow that exports the model. Public projects name the tag 2.21.0 as one they run, and
# 2.21.0-gpu as existing; neither was pulled here. 2.20.0 is the newest in TensorFlow Serving's own release notes.
ARG TF_SERVING_VERSION=2.21.0

FROM python:3.11-slim AS train
ARG REQUIREMENTS=requirements.txt
COPY requirements.txt requirements-gpu.txt /app/
RUN pip install --no-cache-dir --disable-pip-version-check -r "/app/${REQUIREMENTS}" && pip check
COPY pipeline /app/pipeline
COPY export /app/export
COPY serving /app/serving
COPY configs /app/configs
# The code of the image runs, also when a checkout with folders of the same names is mounted at /work.
ENV PYTHONPATH=/app PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# With a mounted folder of another owner: docker run --user "$(id -u):$(id -g)".
RUN useradd --uid 1000 --create-home trainer && install -d -o trainer -g trainer /work
USER trainer
# A job's relative paths start here: mount data, runs and models under it.
WORKDIR /work
# Python is process 1 and gets SIGTERM itself: it saves and exits with 75. Give it time: --stop-timeout.
ENTRYPOINT ["python", "-m", "pipeline"]
CMD ["--help"]

# Both serving targets: TensorFlow Serving's own entrypoint serves ${MODEL_BASE_PATH}/${MODEL_NAME}, here
# /models/movie-reviews, on 8500 (gRPC) and 8501 (REST), and passes on what follows it.
#   --num_load_threads=2       a version that fails to load does not hold up the others for its retries
#   --max_num_load_retries=2   a published version is whole, so only the storage can be at fault: twice more,
#   --load_retry_interval_micros  10 s apart (instead of 5 times, a minute apart)
#   --grpc_max_threads=256     the default, 4 x cores, answered RESOURCE_EXHAUSTED when 16 clients came at once
#   --monitoring_config_file   figures for Prometheus at :8501/monitoring/prometheus/metrics
# For several models, version labels, or a container that may use part of the machine's cores: `python -m serving
# tf-config` writes the configuration and the flags; deploy/ shows both.
# More flags go after the image's name; a later flag wins. Batching is off: read batching.config before turning it on.
# Readiness: GET /v1/models/movie-reviews says AVAILABLE.
FROM tensorflow/serving:${TF_SERVING_VERSION} AS serving-cpu
COPY serving/config /etc/tensorflow-serving
ENV MODEL_NAME=movie-reviews
ENTRYPOINT ["/usr/bin/tf_serving_entrypoint.sh", "--num_load_threads=2", "--max_num_load_retries=2", \
            "--load_retry_interval_micros=10000000", "--grpc_max_threads=256", "--rest_api_num_threads=64", \
            "--monitoring_config_file=/etc/tensorflow-serving/monitoring.config"]

FROM tensorflow/serving:${TF_SERVING_VERSION}-gpu AS serving-gpu
COPY serving/config /etc/tensorflow-serving
ENV MODEL_NAME=movie-reviews
ENTRYPOINT ["/usr/bin/tf_serving_entrypoint.sh", "--num_load_threads=2", "--max_num_load_retries=2", \
            "--load_retry_interval_micros=10000000", "--grpc_max_threads=256", "--rest_api_num_threads=64", \
            "--monitoring_config_file=/etc/tensorflow-serving/monitoring.config"]
