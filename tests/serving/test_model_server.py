"""The whole loop against a real tensorflow_model_server, where TENSORFLOW_MODEL_SERVER names the binary.

The server may lack the operations of TF-Text: the model here is exported without a text signature.
"""

import concurrent.futures
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import threading
import time

import numpy as np
import pytest

from pipeline.contract import Manifest, next_version, versions
from pipeline.errors import ServingError
from serving import server_config
from serving.onnx_classifier import OnnxClassifier
from serving.publish import publish
from serving.tensorflow_serving import TensorFlowServingClient, wait_available
from tests.jobs import copy_trained, published_job

BINARY = os.environ.get("TENSORFLOW_MODEL_SERVER", "")
SERVED_WITHIN_S = 3.0  # what is promised: the server looks for new versions every second

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BINARY, reason="TENSORFLOW_MODEL_SERVER names no tensorflow_model_server binary"),
]


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


class Server:
    """The process, started as tf-config says."""

    def __init__(self, directory, models, *more_flags):
        self.grpc_port, self.rest_port = _free_ports(2)
        server_config.write(directory, {**server_config.files(models), server_config.COMMAND: ""})
        flags = server_config.flags(directory, cores=2, batching=False)
        flags += [f"--port={self.grpc_port}", f"--rest_api_port={self.rest_port}", *more_flags]  # a later flag wins
        self._log_file = directory / "server.log"
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "CUDA_VISIBLE_DEVICES": ""}
        with open(self._log_file, "wb") as log:
            self.process = subprocess.Popen([BINARY, *flags], env=environment, stdout=log, stderr=log)

    @property
    def addresses(self):
        return f"127.0.0.1:{self.grpc_port}", f"http://127.0.0.1:{self.rest_port}"

    @property
    def log(self):
        return self._log_file.read_text(errors="replace")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    export = {"text_signature": False, "precisions": ["float32"]}
    directory = tmp_path_factory.mktemp("real") / "job"
    return copy_trained(published_job(tmp_path_factory), directory, export=export)


@pytest.fixture(scope="module")
def server(job, tmp_path_factory):
    """A server that is up before anything is published, and the first version, which the job waits for."""
    models = [server_config.Model(job.name, str(job.model_dir), {})]
    server = Server(tmp_path_factory.mktemp("config"), models, "--max_num_load_retries=0")
    try:
        done = job.run("--wait-for", server.addresses[1])
        assert done.code == 0, done.stderr + server.log
        yield server
    finally:
        server.stop()


@pytest.fixture
def first(job, tmp_path):
    """A copy of the first version."""
    source = tmp_path / "first"
    shutil.copytree(next(iter(versions(job.model_dir).values())), source)
    return source


def _publish(job, source):
    """Publishes a version directory under the next number, as a rollback does; returns the number."""
    number = next_version(job.model_dir)
    dataclasses.replace(Manifest.read(source), version=number).write(source)
    publish(source, job.model_dir, keep_versions=9)
    return number


def _ids(count):
    rng = np.random.default_rng(count)
    return [rng.integers(1, 300, rng.integers(1, 16)).tolist() for _ in range(count)]


def test_it_answers_as_the_onnx_file_does(server, job):
    from pipeline.text import pad

    rows = _ids(70)
    expected = OnnxClassifier.load(list(versions(job.model_dir).values())[-1]).logits(pad(rows))
    for address in server.addresses:
        with TensorFlowServingClient(address, job.name) as client:
            np.testing.assert_allclose(client.logits(rows), expected, rtol=1e-4, atol=1e-4)
            with pytest.raises(ServingError, match="call `logits`"):
                client.probabilities(["no text signature"])
            with pytest.raises(ServingError, match="the vocabulary"):
                client.logits([[10**6]])
        for arguments, code in [({"name": "other"}, "NOT_FOUND"), ({"name": job.name, "version": 999}, "NOT_FOUND")]:
            with TensorFlowServingClient(address, **arguments) as client, pytest.raises(ServingError) as caught:
                client.logits([[5]])
            assert caught.value.code == code


@pytest.mark.parametrize("protocol", [0, 1], ids=["grpc", "rest"])
def test_new_version_is_warmed_up_and_served_in_time(server, job, first, protocol, record_property):
    number = _publish(job, first)
    started = time.monotonic()
    wait_available(server.addresses[protocol], job.name, number, timeout_s=SERVED_WITHIN_S)
    record_property("served_after_s", round(time.monotonic() - started, 2))
    path = re.escape(str(job.model_dir / str(number)))
    found = re.search(rf"Finished reading warmup data for model at {path}/.*records read: (\d+)", server.log)
    assert found, server.log
    assert int(found[1]) >= 8  # two signatures, two lengths, two batch sizes


def test_swap_under_load_fails_no_request(server, job, first):
    """And so does going back: the first version under a higher number."""
    stop = threading.Event()

    def ask(i):
        answers = 0
        with TensorFlowServingClient(server.addresses[i % 2], job.name, retries=0) as client:
            while not stop.is_set():
                assert client.logits(_ids(1 + answers % 8)).shape[1] == 2
                answers += 1
        return answers

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, i) for i in range(8)]
        try:
            for _ in range(2):
                number = _publish(job, first)
                wait_available(server.addresses[0], job.name, number, timeout_s=60)
                time.sleep(1.5)  # the old version goes meanwhile
        finally:
            stop.set()
        answers = [future.result() for future in asking]
    assert min(answers) > 10
    with TensorFlowServingClient(server.addresses[0], job.name, version=number - 1) as client:
        with pytest.raises(ServingError) as caught:
            client.logits([[5]])
        assert caught.value.code == "NOT_FOUND"


def test_bad_version_is_refused_and_the_old_one_stays(server, job, first):
    good = _publish(job, first)
    wait_available(server.addresses[0], job.name, good, timeout_s=60)
    bad = good + 1
    staged = shutil.copytree(first, job.model_dir / f".staged-{bad}-test")
    shutil.rmtree(staged / "variables")
    staged.rename(job.model_dir / str(bad))
    try:
        with pytest.raises(ServingError, match=f"gave up on {job.name} version {bad}"):
            wait_available(server.addresses[1], job.name, bad, timeout_s=60)
        for address in server.addresses:
            wait_available(address, job.name, good, timeout_s=5)
            with TensorFlowServingClient(address, job.name, retries=0) as client:
                assert client.logits([[5]]).shape == (1, 2)
        number = _publish(job, first)  # one that failed does not hold up the next
        assert number == bad + 1
        wait_available(server.addresses[0], job.name, number, timeout_s=60)
    finally:
        shutil.rmtree(job.model_dir / str(bad))


def test_labels(job, first, tmp_path, server):
    """A server that starts with labels, and a label that moves to a version that came later."""
    stable = _publish(job, first)
    labels = {"stable": stable}
    base = job.model_dir
    model = server_config.Model(job.name, str(base), labels)
    other = Server(tmp_path / "config", [model], "--model_config_file_poll_wait_seconds=1")
    try:
        wait_available(other.addresses[0], job.name, stable, timeout_s=60)
        canary = _publish(job, first)
        wait_available(other.addresses[0], job.name, canary, timeout_s=60)
        files = server_config.files([dataclasses.replace(model, labels={"stable": stable, "canary": canary})])
        server_config.write(tmp_path / "config", {**files, server_config.COMMAND: ""})
        end = time.monotonic() + 60
        with TensorFlowServingClient(other.addresses[0], job.name, label="canary") as client:
            while True:
                try:
                    assert client.logits([[5]]).shape == (1, 2)
                    break
                except ServingError as e:
                    if e.code != "INVALID_ARGUMENT" or time.monotonic() > end:  # the label is not there yet
                        raise
                    time.sleep(0.2)
        with TensorFlowServingClient(other.addresses[1], job.name, label="stable") as client:
            assert client.logits([[5]]).shape == (1, 2)  # still loaded
    finally:
        other.stop()
