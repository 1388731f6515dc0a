"""`--wait-for`: the command ends when the server serves exactly the version that the job became."""

import signal

import pytest

from tests.jobs import kill_when, published_job, snapshot
from tests.serving.stand_in import StandIn, rest_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return published_job(tmp_path_factory)


@pytest.fixture
def model(job):
    return StandIn(job.model_dir / "1")


@pytest.mark.parametrize("command", ["run", "publish"])
def test_waits_until_the_version_is_served(job, model, command):
    """Also when there is nothing left to publish, and each time anew."""
    loading = ("LOADING", "OK", "")
    model.states = {1: [loading, loading, ("AVAILABLE", "OK", "")]}
    before = snapshot(job.model_dir)
    with rest_server(model) as address:
        for _ in range(2):
            done = job.run("--wait-for", address, command=command)
            assert done.code == 0, done.stderr
            assert f"{address} serves version 1 of tiny; waited " in done.last_line
    assert model.states == {1: [("AVAILABLE", "OK", "")]}
    assert snapshot(job.model_dir) == before


def test_timeout_is_an_error_and_changes_nothing(job, model):
    model.states = {2: [("AVAILABLE", "OK", "")]}  # another version is not this one
    before = snapshot(job.model_dir)
    with rest_server(model) as address:
        done = job.run("--wait-for", address, "--wait-timeout-s", "0.5", command="publish")
    assert done.code == 1
    message = f"error: {address} did not serve tiny version 1 within 0.5 s; last seen: NOT_FOUND"
    assert done.last_line.startswith(message)
    assert snapshot(job.model_dir) == before
    assert job.versions == ["1"]


def test_signal_while_waiting(job, model):
    loading = ("LOADING", "OK", "")
    model.states = {1: [loading, loading]}
    with rest_server(model) as address:
        done = kill_when(job, lambda: model.states[1] == [loading], signal.SIGTERM, "publish", "--wait-for", address)
    assert done.code == 75
    assert done.last_line.startswith("error: stopped by SIGTERM")


def test_nobody_at_the_grpc_port(job):
    done = job.run("--wait-for", "127.0.0.1:1", "--wait-timeout-s", "0", command="publish")
    assert done.code == 1
    assert done.last_line.startswith("error: 127.0.0.1:1 did not serve tiny version 1 within 0 s; last seen: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wait-for", "localhost"], "host:port for gRPC"),
        (["--wait-for", "h:1", "--wait-timeout-s", "-1"], "--wait-timeout-s"),
    ],
)
def test_wrong_arguments_are_found_before_anything_is_done(job, arguments, message):
    done = job.run(*arguments)
    assert done.code == 2
    assert message in done.error
