"""Several replicas train as one: in one process on parts of the CPU, and in two processes over the loopback."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from pipeline.cluster import Cluster, read_cluster
from pipeline.errors import JobError
from tests import jobs
from tests.jobs import SETTINGS, finish, make_job, metrics_rows, run_python, training_result, wait_until

ADDRESSES = ["a:1", "b:2", "[::1]:3"]


def tf_config(cluster, kind="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TF_CONFIG": " "}, None),
        (tf_config({"worker": ADDRESSES[:1]}), None),
        (tf_config({"worker": ADDRESSES}), Cluster(tuple(ADDRESSES), 0)),
        (tf_config({"worker": ADDRESSES}, index=2), Cluster(tuple(ADDRESSES), 2)),
        (tf_config({"worker": ADDRESSES[1:], "chief": ADDRESSES[:1]}, "chief"), Cluster(tuple(ADDRESSES), 0)),
        (tf_config({"worker": ADDRESSES[1:], "chief": ADDRESSES[:1]}, index=1), Cluster(tuple(ADDRESSES), 2)),
    ],
)
def test_the_cluster_of_tf_config(environment, expected):
    assert read_cluster("auto", environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TF_CONFIG": "{"}, "is not JSON"),
        ({"TF_CONFIG": "[]"}, "is not JSON with cluster, task.type and task.index"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:2"]}}'}, "KeyError: 'task'"),
        (tf_config({"worker": ADDRESSES}, index=3), "index 3, but its cluster has 3 of type worker"),
        (tf_config({"worker": ADDRESSES}, index="1"), "index '1'"),
        (tf_config({"worker": ADDRESSES}, "chief"), "task type 'chief', which its cluster does not have"),
        (tf_config({"worker": ADDRESSES, "ps": ["c:1"]}), "tasks of type ps; only chief and worker train here"),
        (tf_config({"worker": ADDRESSES, "evaluator": ["c:1"]}, "evaluator"), "tasks of type evaluator"),
        (tf_config({"worker": ["a:1", "a:1"]}), "names an address twice"),
        (tf_config({"worker": ["a:1", "b"]}), "not host:port: 'b'"),
        (tf_config({"worker": ["a:1", "b:70000"]}), "not host:port: 'b:70000'"),
        (tf_config({"chief": ADDRESSES[:2]}, "chief"), "more than one chief"),
    ],
)
def test_a_broken_tf_config_is_named(environment, message):
    with pytest.raises(JobError) as e:
        read_cluster("auto", environment)
    assert message in str(e.value) and str(e.value).startswith("the environment variable TF_CONFIG ")


def test_a_strategy_that_does_not_fit_is_refused(deterministic):
    from pipeline.replicas import open_replicas

    with pytest.raises(JobError, match='"multi_worker", but the environment variable TF_CONFIG names no other'):
        open_replicas("multi_worker", None)
    with pytest.raises(JobError, match='"mirrored", which needs two GPUs, but TensorFlow sees [01]. Use "auto"'):
        open_replicas("mirrored", None)
    for strategy in ("one", "mirrored"):
        with pytest.raises(JobError, match=f'"{strategy}", but TF_CONFIG names 3 workers'):
            read_cluster(strategy, tf_config({"worker": ADDRESSES}))


# The roll call, in threads.


@pytest.fixture
def pair():
    """Cluster descriptions of a chief and one worker on free ports."""
    addresses = _free_addresses(2)
    return [Cluster(addresses, rank) for rank in range(2)]


def _free_addresses(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = tuple(f"127.0.0.1:{s.getsockname()[1]}" for s in sockets)
    for s in sockets:
        s.close()
    return addresses


def _in_thread(function, *args):
    outcome = []

    def run():
        try:
            outcome.append(function(*args))
        except JobError as e:
            outcome.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_roll_call(pair):
    """The worker is first; a stranger knocks, and one with another key is sent away and does not count."""
    chief, worker = pair
    notes = []
    ready, there = _in_thread(worker.call_roll, "key", notes.append)
    wrong, refused = _in_thread(worker.call_roll, "other", notes.append)
    port = int(chief.addresses[0].split(":")[1])

    def knock():
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")

    notes_of_chief = []
    assert chief.call_roll("key", lambda line: (notes_of_chief.append(line), "waiting" in line and knock()))
    ready.join(30)
    assert there == [True]
    assert notes_of_chief[0] == f"waiting for 1 of 2 workers: {worker.addresses[1]}"
    assert notes[0] == f"waiting for the chief, {chief.addresses[0]}"
    if wrong.is_alive():  # the chief left before it came
        assert chief.call_roll("other", notes.append)
        wrong.join(30)
        assert refused == [True]
    else:
        assert "Start every worker with the same job" in str(refused[0])


def test_a_worker_with_other_data_is_refused(pair):
    chief, worker = pair
    notes = []
    _in_thread(chief.call_roll, "key", notes.append)
    with pytest.raises(JobError, match="are not those of the chief"):
        worker.call_roll("other", notes.append)
    assert worker.call_roll("key", notes.append)  # the chief still waits
    assert any("has another job file or other input files" in line for line in notes)


def test_a_worker_does_not_take_an_old_server_for_the_roll_call(pair):
    """What holds the chief's port here is TensorFlow's server of a training that breaks down: it talks HTTP/2."""
    chief, worker = pair
    with socket.create_server(("127.0.0.1", int(chief.addresses[0].split(":")[1]))) as server:
        thread, outcome = _in_thread(worker.call_roll, "key", lambda line: None)
        for _ in range(2):
            with server.accept()[0] as connection:
                connection.sendall(b"\0\0\x18\4\0\0\0\0\0")
    assert chief.call_roll("key", lambda line: None)
    thread.join(30)
    assert outcome == [True]


def test_nobody_waits_for_the_chief_of_a_finished_training(pair):
    assert pair[1].call_roll("key", lambda line: None, is_done=lambda: True) is False


def test_a_port_in_use_is_named(pair):
    port = int(pair[0].addresses[0].split(":")[1])
    with socket.create_server(("", port)), pytest.raises(JobError, match=f"cannot listen on port {port}"):
        pair[0].call_roll("key", lambda line: None)


# Replicas in one process: TensorFlow takes a CPU apart only before anything else, hence in a process of its own.

_TRAIN_ON_CPUS = """
import json, sys
from pipeline.runtime import start_tensorflow
start_tensorflow()
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig, TrainingConfig
from pipeline.layers.dropout import Dropout
from pipeline.replicas import Mirrored, OneDevice
from pipeline.train_step import TrainStep

sizes = {"d_model": 16, "num_heads": 2, "d_ff": 24, "num_layers": 1, "max_length": 16}
rng = np.random.default_rng(0)

def batch(size):
    token_ids = rng.integers(2, 40, (size, rng.integers(1, 12))).astype(np.int32)
    labels = token_ids[:, 0] % 3
    for row in token_ids:
        row[rng.integers(1, len(row) + 1):] = 0
    return token_ids, labels

batches = [batch(size) for size in [1, 1, *rng.integers(1, 9, 98)]]  # with one row: none for the second replica

def curve(replicas, dropout, section):
    config = ModelConfig(**sizes, dropout=dropout, head_dropout=dropout)
    training = TrainingConfig(accumulate_batches=2, **section)
    with replicas.scope():
        model = build_classifier(config, 40, 3, seed=1, dtype=training.precision)
        step = TrainStep(model, training, [1.0, 2.0, 0.5], replicas)
    losses = [step(batches[i : i + 2], 5e-3)[0] for i in range(0, 100, 2)]
    with step.evaluated_weights():
        size = float(sum(np.abs(v.numpy()).sum() for v in model.weights))
    seeds = [v.numpy().tolist() for v in model.non_trainable_variables]
    return {"losses": losses, "size": size, "seeds": seeds}

cpus = Mirrored(tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"]))
with cpus.scope():
    dropout = Dropout(0.5, seed=1)
drop = tf.function(lambda: cpus.strategy.run(lambda: dropout(tf.ones([50]), training=True)))
masks = [[m.numpy().tolist() for m in drop().values] for _ in range(2)]
curves = [[curve(r, *case) for r in (OneDevice(), cpus)] for case in json.loads(sys.argv[1])]
print(json.dumps([curves, masks]))
"""


_CASES = [
    (0.0, {}),
    (0.0, {"r_drop": 1.0, "ema_decay": 0.9, "label_smoothing": 0.1}),
    (0.0, {"precision": "mixed_float16"}),
    (0.3, {}),
    (0.3, {}),
]


@pytest.fixture(scope="module")
def on_cpus():
    """Per case what came of 50 steps on one device and on two; the masks of one dropout in 2 calls on 2 replicas."""
    return run_python(_TRAIN_ON_CPUS, json.dumps(_CASES))


@pytest.mark.slow
def test_replicas_have_the_loss_curve_of_one(on_cpus):
    curves, _ = on_cpus
    for (_, section), (one, several) in zip(_CASES[:3], curves[:3], strict=True):
        atol = 2e-3 if section.get("precision") == "mixed_float16" else 1e-5  # a step of float16 is 2**-11
        np.testing.assert_allclose(several["losses"], one["losses"], atol=atol, rtol=0, err_msg=str(section))
        assert several["size"] == pytest.approx(one["size"], rel=1e-2 if "precision" in section else 1e-4)
        assert several["losses"][-1] < 0.8 * several["losses"][0]


@pytest.mark.slow
def test_replicas_drop_other_values_from_one_state(on_cpus):
    curves, masks = on_cpus
    assert all(set(mask) == {0.0, 2.0} for call in masks for mask in call)
    assert len({tuple(mask) for call in masks for mask in call}) == 4
    (one, several), (_, again) = curves[3:]
    assert again == several  # bit for bit
    assert np.abs(np.subtract(several["losses"], one["losses"])).max() > 1e-2
    assert several["seeds"] == one["seeds"] and len(one["seeds"]) > 1


# Workers: processes of the command line.


def start_workers(job, command="train", count=2, programs=(("-m", "pipeline"),) * 2):
    addresses = _free_addresses(count)
    environment = {k: v for k, v in jobs.environment().items() if k != "TF_CPP_MIN_LOG_LEVEL"}  # as in a pod
    return [
        subprocess.Popen(
            [sys.executable, *programs[index], command, str(job.file)],
            env={**environment, **tf_config({"worker": addresses}, index=index)},
            cwd=jobs.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def run_workers(job, command="train"):
    """Runs a chief and a worker to their end; returns what became of both."""
    return [finish(process) for process in start_workers(job, command)]


def interrupt_workers(job, victim, number, rows):
    """Sends one of two workers a signal when so many rows are logged; returns what became of both."""
    processes = start_workers(job)
    try:
        wait_until(lambda: len(metrics_rows(job.run_dir)) >= rows, processes[victim])
    except BaseException:
        for process in processes:
            process.kill()
        raise
    processes[victim].send_signal(number)
    return [finish(process) for process in processes]


def prepared_job(directory, **sections):
    job = make_job(directory, **sections)
    done = job.run(command="prepare")
    assert done.code == 0, done.stderr
    return job


@pytest.mark.slow
def test_two_workers_agree_with_one_and_the_chief_publishes(tmp_path):
    sections = {
        "model": {"dropout": 0.0, "head_dropout": 0.0}, "training": {"epochs": 4}, "pretraining": {"epochs": 1},
    }  # fmt: skip
    one, two = make_job(tmp_path / "one", **sections), make_job(tmp_path / "two", **sections)
    for command in ("prepare", "train"):
        done = one.run(command=command)
        assert done.code == 0, done.stderr
    chief, worker = run_workers(two, "run")
    assert (chief.code, worker.code) == (0, 0), chief.stderr + worker.stderr
    assert worker.error.startswith("waiting for the chief") and worker.stdout == ""
    assert two.versions == ["1"] and "published" in chief.stdout
    assert b"job:worker" not in (two.model_dir / "1" / "saved_model.pb").read_bytes()
    kinds = "pretraining", "pretraining_validation", "train"
    losses = [[row["loss"] for row in metrics_rows(job.run_dir) if row["kind"] in kinds] for job in (one, two)]
    assert len(losses[0]) >= 50
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-5, rtol=0)

    chief, worker = run_workers(two, "run")
    assert (chief.code, worker.code) == (0, 0)
    assert "nothing to do" in chief.stderr and "nothing to do" in worker.error


@pytest.mark.slow
def test_two_workers_killed_and_started_again_go_on_exactly(tmp_path):
    whole = prepared_job(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    killed = make_job(tmp_path / "killed")
    (tmp_path / "killed" / "runs").mkdir(exist_ok=True)
    chief, worker = run_workers(whole)
    assert (chief.code, worker.code) == (0, 0), chief.stderr + worker.stderr
    weights, rows = training_result(whole.run_dir)

    for victim, logged in [(1, 5), (0, 20)]:
        done = interrupt_workers(killed, victim, signal.SIGKILL, logged)
        assert done[victim].code == -signal.SIGKILL
        assert done[1 - victim].code == 1, done[1 - victim].stderr
        assert done[1 - victim].last_line.startswith("error: another worker of this job has ended")
        assert killed.leftovers() == []
    done = interrupt_workers(killed, 1, signal.SIGTERM, 32)
    assert [d.code for d in done] == [75, 75], done[0].stderr + done[1].stderr
    assert "stopped by a signal to another worker at step" in done[0].last_line
    assert "stopped by SIGTERM at step" in done[1].last_line
    steps = {d.last_line.split(" at step ")[1].split(",")[0] for d in done}
    assert {f"step-{int(step):08d}" for step in steps} == {max(os.listdir(killed.run_dir / "checkpoints"))}
    chief, worker = run_workers(killed)
    assert (chief.code, worker.code) == (0, 0), chief.stderr + worker.stderr
    assert "going on from step" in chief.stderr
    found_weights, found_rows = training_result(killed.run_dir)
    assert found_rows == rows
    assert {k: v.tobytes() for k, v in found_weights.items()} == {k: v.tobytes() for k, v in weights.items()}


# Before the last word goes around that training is finished: waits in one worker until the other has left.
ENDS_LAST = """
import functools, os, sys, time
import pipeline.training
from pipeline.commands import main
other = {other!r}
def wait(epoch, figures):
    if epoch == {epochs} - 1:
        open(other + ".now", "w").close()
        while not os.path.exists(other + ".gone"):
            time.sleep(0.01)
pipeline.training.train = functools.partial(pipeline.training.train, after_validation=wait)
main()
"""


@pytest.mark.slow
def test_a_worker_that_is_lost_when_training_is_finished_is_not_missed(tmp_path):
    job = prepared_job(tmp_path / "job")
    script = tmp_path / "ends_last.py"
    script.write_text(ENDS_LAST.format(other=str(tmp_path / "worker"), epochs=SETTINGS["training"]["epochs"]))
    chief, worker = start_workers(job, programs=((str(script),), ("-m", "pipeline")))
    try:
        wait_until((tmp_path / "worker.now").exists, chief)
    except BaseException:
        chief.kill()
        raise
    finally:
        worker.kill()
        finish(worker)
    (tmp_path / "worker.gone").touch()
    done = finish(chief)
    assert done.code == 0, done.stderr
    done = job.run(command="evaluate")
    assert done.code == 0, done.stderr
