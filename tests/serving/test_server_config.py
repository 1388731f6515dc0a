"""The configuration files are what TensorFlow Serving reads, the flags are flags of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from tensorflow_serving.config import model_server_config_pb2  # unlike tensorflow_serving.apis without TensorFlow

from serving import __main__ as command
from serving import server_config

ROOT = Path(__file__).parents[2]

# The flags of tensorflow_serving/model_servers/main.cc that are used anywhere here.
KNOWN_FLAGS = {
    "port", "rest_api_port", "rest_api_num_threads", "rest_api_timeout_in_ms", "enable_batching",
    "allow_version_labels_for_unavailable_models", "batching_parameters_file", "model_config_file",
    "model_config_file_poll_wait_seconds", "model_name", "model_base_path", "num_load_threads", "num_unload_threads",
    "max_num_load_retries", "load_retry_interval_micros", "file_system_poll_wait_seconds", "flush_filesystem_caches",
    "tensorflow_session_parallelism", "tensorflow_session_config_file", "tensorflow_intra_op_parallelism",
    "tensorflow_inter_op_parallelism", "ssl_config_file", "platform_config_file", "per_process_gpu_memory_fraction",
    "saved_model_tags", "grpc_channel_arguments", "grpc_max_threads", "enable_model_warmup",
    "num_request_iterations_for_warmup", "version", "monitoring_config_file", "enable_grpc_healthcheck_service",
}  # fmt: skip

# tensorflow-serving-api 2.21 has no Python module for these two; fields as in session_bundle_config.proto and
# monitoring_config.proto of TensorFlow Serving.
_OTHER_PROTOS = """
name: "other.proto" package: "other" syntax: "proto3" dependency: "google/protobuf/wrappers.proto"
message_type {
  name: "BatchingParameters"
  field { name: "max_batch_size" number: 1 type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "batch_timeout_micros" number: 2 type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "max_enqueued_batches" number: 3 type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "num_batch_threads" number: 4 type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
  field { name: "allowed_batch_sizes" number: 6 type: TYPE_INT64 label: LABEL_REPEATED }
  field { name: "pad_variable_length_inputs" number: 7 type: TYPE_BOOL }
  field { name: "enable_large_batch_splitting" number: 8 type: TYPE_MESSAGE type_name: ".google.protobuf.BoolValue" }
  field { name: "max_execution_batch_size" number: 9 type: TYPE_MESSAGE type_name: ".google.protobuf.Int64Value" }
}
message_type {
  name: "PrometheusConfig"
  field { name: "enable" number: 1 type: TYPE_BOOL }
  field { name: "path" number: 2 type: TYPE_STRING }
}
message_type {
  name: "MonitoringConfig"
  field { name: "prometheus_config" number: 1 type: TYPE_MESSAGE type_name: ".other.PrometheusConfig" }
}
"""


def _parse(text, name):
    from google.protobuf import wrappers_pb2

    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    file = text_format.Parse(_OTHER_PROTOS, descriptor_pb2.FileDescriptorProto())
    pool.AddSerializedFile(file.SerializeToString())
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"other.{name}"))
    return text_format.Parse(text, message())


@pytest.fixture
def base_path(tmp_path):
    for path in ("reviews/7", "reviews/8", "news/0009", "unfinished", "Not-A-Model/1"):
        (tmp_path / "mo dels" / path).mkdir(parents=True)
    return tmp_path / "mo dels"


def _run(*arguments):
    done = [sys.executable, "-m", "serving", "tf-config", *map(str, arguments)]
    return subprocess.run(done, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_files_and_command(base_path, tmp_path):
    out = tmp_path / "out"
    labels = ["--stable", "reviews=7", "--canary", "reviews=8"]
    done = _run("--base-path", base_path, "--output", out, "--cores", "3", *labels)
    assert (done.returncode, done.stderr) == (0, "")
    files = ["batching.config", "models.config", "monitoring.config", "serve.sh"]
    assert sorted(p.name for p in out.iterdir()) == files
    parsed = text_format.Parse((out / "models.config").read_text(), model_server_config_pb2.ModelServerConfig())
    parsed = parsed.model_config_list.config
    assert [(m.name, m.base_path, m.model_platform) for m in parsed] == [
        (name, str(base_path / name), "tensorflow") for name in ("news", "reviews")
    ]
    assert parsed[0].model_version_policy.latest.num_versions == 1
    assert parsed[1].model_version_policy.WhichOneof("policy_choice") == "all"
    assert [dict(m.version_labels) for m in parsed] == [{}, {"stable": 7, "canary": 8}]
    assert done.stdout == (out / "serve.sh").read_text()
    assert os.access(out / "serve.sh", os.X_OK)
    given = _flags(out / "serve.sh")
    assert set(given) <= KNOWN_FLAGS
    assert given["model_config_file"] == str(out / "models.config")
    assert given["monitoring_config_file"] == str(out / "monitoring.config")
    assert given["tensorflow_intra_op_parallelism"] == given["tensorflow_inter_op_parallelism"] == "3"
    assert int(given["num_load_threads"]) >= 2
    assert given["allow_version_labels_for_unavailable_models"] == "true"
    assert "enable_batching" not in given


def _flags(script):
    """Returns name -> value of what the script calls the server with; a shell reads it, not this test."""
    server = script.with_name("tensorflow_model_server")
    server.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    server.chmod(0o755)
    environment = {**os.environ, "PATH": f"{server.parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(script), "--last=1"], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines.pop() == "--last=1"
    return dict(line.removeprefix("--").split("=", 1) for line in lines)


def test_a_server_that_sees_other_paths(base_path, tmp_path):
    """As in deploy/: the versions are looked up here, the server finds them there."""
    out = tmp_path / "out"
    there = ["--server-base-path", "/models", "--server-config-dir", "/etc/tensorflow-serving"]
    done = _run("--base-path", base_path, "--output", out, "--name", "reviews", "--stable", "7", *there)
    assert (done.returncode, done.stderr) == (0, "")
    text = (out / "models.config").read_text()
    (parsed,) = text_format.Parse(text, model_server_config_pb2.ModelServerConfig()).model_config_list.config
    assert (parsed.base_path, dict(parsed.version_labels)) == ("/models/reviews", {"stable": 7})
    given = _flags(out / "serve.sh")
    assert given["model_config_file"] == "/etc/tensorflow-serving/models.config"
    assert given["monitoring_config_file"] == "/etc/tensorflow-serving/monitoring.config"


def test_batching_on_a_gpu(base_path, tmp_path):
    done = _run("--base-path", base_path, "--output", tmp_path / "out", "--gpu", "--name", "news")
    assert (done.returncode, done.stderr) == (0, "")
    given = _flags(tmp_path / "out" / "serve.sh")
    assert set(given) <= KNOWN_FLAGS
    assert given["enable_batching"] == "true"  # the server does not start with the file and without the switch
    assert given["batching_parameters_file"] == str(tmp_path / "out" / "batching.config")
    assert (tmp_path / "out" / "batching.config").read_text() == (ROOT / "serving/config/batching.config").read_text()


def test_batching_config_allows_what_the_constant_says():
    parsed = _parse(server_config.files([])["batching.config"], "BatchingParameters")
    assert parsed.max_execution_batch_size.value == server_config.MAX_BATCH_ROWS
    assert parsed.enable_large_batch_splitting.value
    assert parsed.max_batch_size.value >= server_config.MAX_BATCH_ROWS
    assert parsed.allowed_batch_sizes in ([], [*parsed.allowed_batch_sizes[:-1], parsed.max_batch_size.value])
    assert not parsed.pad_variable_length_inputs  # the server would pad with the first id of a row
    with pytest.raises(text_format.ParseError):
        _parse("max_batch_rows { value: 3 }", "BatchingParameters")


def test_monitoring_config():
    parsed = _parse(server_config.files([])["monitoring.config"], "MonitoringConfig")
    assert parsed.prometheus_config.enable
    assert parsed.prometheus_config.path == "/monitoring/prometheus/metrics"


def test_model_without_a_version_is_served_when_it_is_named(base_path, tmp_path):
    done = _run("--base-path", base_path, "--name", "unfinished", "--output", tmp_path / "out")
    assert done.returncode == 0
    assert done.stderr.startswith(f"warning: {base_path / 'unfinished'} has no version yet")
    assert 'name: "unfinished"' in (tmp_path / "out" / "models.config").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-path", "nowhere"], "no model has a version under .*/nowhere"),
        (["--name", "A"], "Received: --name A"),
        (["--name", "reviews", "--stable", "9"], "has no version 9; it has 7, 8. Received: --stable 9"),
        (["--stable", "7"], "Received: --stable 7"),
        (["--stable", "reviews=x"], "Received: --stable reviews=x"),
        (["--canary", "other=7"], "'other', which is not among the models news, reviews"),
        (["--cores", "0"], "Received: --cores 0"),
        (["--cores", "x"], "--cores"),
        (["--output", "/dev/null/x"], "cannot write to /dev/null/x"),
    ],
)
def test_wrong_arguments(base_path, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = command.main(["tf-config", "--base-path", str(base_path), *arguments])
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: .*{message}.*\n", err)
    assert not (tmp_path / "tf-serving").exists()


def test_cores_are_those_of_the_container():
    assert 1 <= server_config.available_cores() <= len(os.sched_getaffinity(0))
