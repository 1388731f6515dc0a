"""Signals and kills at any moment: nothing half-written is left, and running the job again goes on."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from pipeline import checkpoint
from pipeline.config import load_job
from pipeline.contract import Manifest
from pipeline.files import locked
from pipeline.tuning import with_settings
from tests.jobs import (
    contents,
    copy_trained,
    finish,
    kill_when,
    make_job,
    make_rows,
    metrics_rows,
    published_job,
    run_pipeline,
    run_script,
    wait_until,
)
from tests.kills import Moment, differing, result, run_process, where_it_stands

pytestmark = pytest.mark.slow

INTERRUPTED = 75


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return published_job(tmp_path_factory)


def _assert_same_training(job, other):
    assert differing(result(job.run_dir), result(other.run_dir)) == []


def _assert_published_once(job):
    assert job.versions == ["1"]
    Manifest.read(job.model_dir / "1").check_files(job.model_dir / "1")
    assert job.leftovers() == []


def test_a_dozen_kills_in_one_training(published, forks, tmp_path):
    """SIGKILL at seeded random moments: in file operations of a save, in steps, in compilations, at epochs' ends."""
    expected = result(published.run_dir)
    epoch_ends = [row["step"] for row in expected["metrics.jsonl"] if row["kind"] == "validation"]
    job = make_job(tmp_path)
    assert job.run(command="prepare").code == 0
    rng = random.Random(11)
    hits, resumed_at = [], []
    for end in epoch_ends:
        for kind in [*rng.sample(["file", "compile", "step"], 2), "end", "file"]:
            saved = checkpoint.newest_progress(job.run_dir / "checkpoints")
            resumed_at.append(saved.step if saved else 0)
            moment = {
                "file": Moment("file", rng.randint(1, 25)),
                "compile": Moment("compile", delay_s=rng.uniform(0, 0.5)),
                "step": Moment("row", resumed_at[-1] + rng.randint(1, 3), rng.uniform(0, 0.002)),
                "end": Moment("row", end, rng.uniform(0, 0.01)),
            }[kind]
            interval = f"training.checkpoint_every_steps={rng.choice([3, 5, 8])}"
            done = forks.run(job, moment, "--set", interval)
            assert done.code in (-signal.SIGKILL, 0), done.stderr
            if done.code:
                hits.append(where_it_stands(job.run_dir, epoch_ends))
    assert forks.run(job, None).code == 0
    assert differing(result(job.run_dir), expected) == []
    steps = [row["step"] for row in metrics_rows(job.run_dir) if row["kind"] == "train"]
    assert steps == list(range(1, epoch_ends[-1] + 1))  # none twice, none left out
    assert job.leftovers() == []
    # And it was as hard as it should be.
    assert len(hits) >= 10
    assert len([hit for hit in hits if "save" in hit]) >= 2
    assert any(a == b > 0 for a, b in itertools.pairwise(resumed_at)), "never twice between two checkpoints"


def test_kills_and_signals_in_the_pretraining(forks, tmp_path):
    texts = tmp_path / "texts.csv"
    texts.write_text("\n".join(["text", *(f"the plot was dull and weak {i}" for i in range(80))]) + "\n")
    sections = {"data": {"unlabelled": str(texts)}, "pretraining": {"epochs": 2, "learning_rate": 1e-2}}
    job = make_job(tmp_path / "job", make_rows(120), **sections, tokenizer={"vocab_size": 320}, training={"epochs": 1})
    done = forks.run(job, None, command="prepare")
    assert done.code == 0 and "unlabelled 80 rows" in done.stderr, done.stderr
    shutil.copytree(job.run_dir, tmp_path / "prepared")
    done = forks.run(job, None)
    assert done.code == 0 and "pretraining epoch 2, step " in done.stderr, done.stderr
    expected = result(job.run_dir)
    ends = [row["step"] for row in expected["metrics.jsonl"] if row["kind"] == "pretraining_validation"]
    shutil.rmtree(job.run_dir)
    shutil.copytree(tmp_path / "prepared", job.run_dir)
    for moment, code in [
        (Moment("row", 2), -signal.SIGKILL),
        (Moment("file", 22), -signal.SIGKILL),  # in the first save
        (Moment("row", ends[0] - 1, signals=(signal.SIGTERM,)), INTERRUPTED),
        (Moment("row", ends[0], delay_s=0.005), -signal.SIGKILL),
        (Moment("row", ends[1], signals=(signal.SIGINT, signal.SIGTERM)), INTERRUPTED),
    ]:
        done = forks.run(job, moment)
        assert done.code == code, done.stderr
        assert not (job.run_dir / "checkpoints").exists()
        assert code != INTERRUPTED or "epochs of pretraining done; the state is saved" in done.last_line
    # It is not begun anew because of another setting: that is refused, whatever is lost.
    for command in ("run", "train"):
        done = job.run("--set", "pretraining.epochs=3", command=command)
        assert done.code == 2 and f"at step {ends[1]} of its pretraining: pretraining.epochs: 2 -> 3." in done.error
    assert forks.run(job, None).code == 0
    assert differing(result(job.run_dir), expected) == []
    assert job.leftovers() == []


_WITH_A_LIMIT = """
import resource, sys
from pipeline import commands
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
sys.argv = ["pipeline", "train", sys.argv[1]]
commands.main()
"""


@pytest.mark.parametrize("limit", ["size of the disk", "size of a file"])
def test_no_room_for_a_checkpoint(published, forks, tmp_path, limit, request):
    """A clear error, nothing half-written, and the run goes on to the same result once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if limit == "size of the disk":
        resize = request.getfixturevalue("mounted")(disk)
    job = copy_trained(published, disk / "job")
    shutil.rmtree(max((job.run_dir / "checkpoints").iterdir()))
    before = contents(job.run_dir / "checkpoints")
    if limit == "size of the disk":
        resize(shutil.disk_usage(disk).used + (80 << 10))  # less than a checkpoint has
        done = forks.run(job, None)
        resize(64 << 20)
    else:
        script = tmp_path / "limited.py"
        script.write_text(_WITH_A_LIMIT)
        done = run_script(script, job.file)
    assert done.code == 1, done.stderr
    assert done.last_line.startswith(f"error: cannot write checkpoint {job.run_dir}")
    assert {"size of the disk": "No space left", "size of a file": "File too large"}[limit] in done.last_line
    assert "make room on the disk and run again" in done.last_line
    assert contents(job.run_dir / "checkpoints") == before
    assert job.leftovers() == []

    done = forks.run(job, None)
    assert done.code == 0, done.stderr
    assert "going on from step 42, 2 of 3 epochs done" in done.stderr
    _assert_same_training(job, published)


@pytest.fixture
def mounted():
    """Mounts a file system on a directory; the returned function sets its size."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs root and mount, to fill a real file system")
    on = []

    def mount(directory):
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
        on.append(directory)
        return lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", directory], check=True)

    yield mount
    for directory in on:
        subprocess.run(["umount", directory], check=True)


def test_signals_while_training_save_and_a_later_run_goes_on(published, tmp_path):
    job = make_job(tmp_path)
    process = job.start()
    try:
        wait_until(lambda: len(metrics_rows(job.run_dir)) >= 5, process)
        started = time.monotonic()
        second = job.run()  # while the first holds the lock
        assert second.code == 5
        assert str(process.pid) in second.error
        assert time.monotonic() - started < 10
    finally:
        process.terminate()
    done = finish(process)
    assert done.code == INTERRUPTED, done.stderr
    assert "SIGTERM" in done.last_line and "Run the same command again" in done.last_line
    assert job.leftovers() == []
    stopped_at = len(metrics_rows(job.run_dir))

    # SIGINT, and more signals while it saves and ends.
    process = job.start()
    wait_until(lambda: len(metrics_rows(job.run_dir)) > stopped_at + 3, process)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.003)
    done = finish(process)
    assert done.code == INTERRUPTED, done.stderr
    assert "SIG" in done.last_line
    assert job.leftovers() == []

    done = job.run(command="train")
    assert done.code == 0, done.stderr
    assert "going on from step" in done.stderr
    _assert_same_training(job, published)


def test_signals_at_any_moment_of_a_training(published, forks, tmp_path):
    """One or several, while TensorFlow is imported, in compilations, saves, steps and validations."""
    job = make_job(tmp_path)
    assert job.run(command="prepare").code == 0
    term, interrupt = signal.SIGTERM, signal.SIGINT
    rng = random.Random(5)
    moments = [
        (run_process, Moment("time", 0, rng.uniform(0.8, 2.0), (interrupt,))),
        (forks.run, Moment("compile", 0, rng.uniform(0, 0.5), (term, interrupt, term), 0.01)),
        (forks.run, Moment("file", rng.randint(5, 25), signals=(interrupt, interrupt))),
        (forks.run, Moment("row", 15, rng.uniform(0, 0.01), (term,))),
        (forks.run, Moment("row", 18, rng.uniform(0, 0.002), (interrupt, term), 0.001)),
    ]
    for run, moment in moments:
        done = run(job, moment)
        assert done.code == INTERRUPTED, (moment, done.stderr)
        assert done.last_line.startswith("error: stopped by SIG"), done.stderr
        assert "Exception ignored" not in done.stderr
        assert done.stderr.count("error: ") == 1
        assert job.leftovers() == []
    assert forks.run(job, None).code == 0
    _assert_same_training(job, published)


def test_signal_between_the_end_of_a_stage_and_the_end_of_the_command(tmp_path):
    """Wherever it lands, it is one line and 75: here while the lock is released, and while another error is shown."""
    job = make_job(tmp_path)
    script = tmp_path / "late.py"
    script.write_text(
        "import contextlib, os, signal, sys\n"
        "from pipeline import commands\n"
        "ignore = commands._ignore_signals\n"
        "def late():\n"
        "    commands._ignore_signals = ignore\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    ignore()\n"
        "commands._ignore_signals = late\n"
        "sys.argv = ['pipeline', 'prepare', *sys.argv[1:]]\n"
        "commands.main()\n"
    )
    for options in ([], ["--set", "data.text_column=absent"]):
        done = run_script(script, job.file, *options)
        assert done.code == INTERRUPTED
        assert done.last_line.startswith("error: stopped by SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_preparing(published, tmp_path, number):
    job = make_job(tmp_path)
    done = kill_when(job, job.run_dir.exists, number, command="prepare")
    # It may just have been done.
    assert done.code in (INTERRUPTED, 0), done.stderr
    assert "Traceback" not in done.stderr
    if done.code == INTERRUPTED:
        assert done.last_line.startswith(f"error: stopped by {number.name}")
    assert job.leftovers() == []
    done = job.run(command="prepare")
    assert done.code == 0, done.stderr
    assert (job.run_dir / "data" / "labels.json").is_file()
    assert job.leftovers() == []


def test_signal_while_exporting(published, forks, tmp_path):
    job = copy_trained(published, tmp_path, keep=["data", "checkpoints", "best", "metrics.jsonl", "evaluation"])
    done = kill_when(job, lambda: list(job.run_dir.glob(".staged-candidate-*")), signal.SIGTERM, command="export")
    assert done.code == INTERRUPTED, done.stderr
    assert done.last_line.startswith("error: stopped by SIGTERM")
    assert job.leftovers() == []  # no candidate either

    # And while a fresh process reloads the artifacts.
    done = kill_when(job, lambda: list(job.run_dir.glob(".staged-candidate-*/manifest.json")), signal.SIGINT)
    assert done.code == INTERRUPTED, done.stderr
    assert done.last_line.startswith("error: stopped by SIGINT")
    assert job.leftovers() == []
    done = forks.run(job, None, command="run")
    assert done.code == 0, done.stderr
    _assert_published_once(job)


def test_signal_swallowed_as_another_error_still_ends_with_75(tmp_path):
    """A library that turns every exception into its own must not turn an interruption into a refusal."""
    job = make_job(tmp_path)
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pipeline import commands, dataset\n"
        "from pipeline.errors import GateRefused\n"
        "def prepare(*args):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except Exception as e:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        raise GateRefused('no') from e\n"
        "dataset.prepare = prepare\n"
        "sys.argv = ['pipeline', 'prepare', sys.argv[1]]\n"
        "commands.main()\n"
    )
    done = run_script(script, job.file)
    assert done.code == INTERRUPTED
    assert done.error.startswith("error: stopped by SIGTERM")


def test_signal_lost_in_a_callback_stops_the_job_at_the_next_step(tmp_path):
    """Python drops what a signal raises inside a `__del__`."""
    job = make_job(tmp_path)
    script = tmp_path / "lost.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pipeline import commands, dataset\n"
        "class Lost:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "prepare = dataset.prepare\n"
        "def prepare_and_lose(*args):\n"
        "    Lost()\n"
        "    return prepare(*args)\n"
        "dataset.prepare = prepare_and_lose\n"
        "sys.argv = ['pipeline', 'run', sys.argv[1]]\n"
        "commands.main()\n"
    )
    done = run_script(script, job.file)
    assert done.code == INTERRUPTED
    assert done.last_line.startswith("error: stopped by SIGTERM")
    assert (job.run_dir / "data").is_dir()
    assert not (job.run_dir / "checkpoints").exists()


def test_the_same_seed_gives_the_same_weights_whatever_pythonhashseed(published, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # of `published` it is random
    job = make_job(tmp_path)
    for command in ("prepare", "train"):
        done = job.run(command=command)
        assert done.code == 0, done.stderr
    assert contents(job.run_dir / "data" / "train") == contents(published.run_dir / "data" / "train")
    _assert_same_training(job, published)


def test_killed_at_any_moment(published, tmp_path):
    """SIGKILL at random moments of the whole run, each somewhat later than the progress made so far."""
    job = make_job(tmp_path)
    rng = random.Random(7)
    for low, high in [(0.1, 1.0), (1.0, 5.0), (4.0, 7.0), (4.0, 9.0), (5.0, 12.0)]:
        process = job.start()
        end = time.monotonic() + rng.uniform(low, high)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        process.kill()
        done = finish(process)
        assert done.code in (-9, 0), done.stderr
        for version in job.versions:  # what is there is whole at every moment
            Manifest.read(job.model_dir / version).check_files(job.model_dir / version)
    done = job.run()
    assert done.code == 0, done.stderr
    _assert_published_once(job)
    _assert_same_training(job, published)


@pytest.mark.parametrize(
    "leftover", [".staged-data-1/train/tokens.npy", "evaluation/.staged-report.json-1", ".staged-candidate-1/x"]
)
def test_what_a_dead_process_left_is_removed(tmp_path, leftover):
    job = make_job(tmp_path)
    path = job.run_dir / leftover
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    done = run_pipeline("prepare", job.file)
    assert done.code == 0, done.stderr
    assert job.leftovers() == []


def test_a_tuning_that_was_killed_ends_with_the_same_job(forks, tmp_path):
    """SIGKILL in the middle of the second of three trials, SIGTERM somewhat later in it."""
    whole, cut = (make_job(tmp_path / name, training={"epochs": 1}) for name in ("whole", "cut"))

    def outcome(job):
        tuned = job.file.with_suffix(".tuned.toml").read_text(encoding="utf-8")
        trials = json.loads((job.directory / "runs/tiny.tuning/trials.json").read_text(encoding="utf-8"))
        trials = [(t["number"], t["state"], t["settings"], t["values"]) for t in trials]
        return trials, tuned.replace(str(job.directory), "")

    arguments = "--trials", 3, "--set", "training.checkpoint_every_steps=2", "--set", "seed=0"
    done = forks.run(whole, None, "--trials", 1, *arguments[2:], command="tune")
    assert done.code == 0, done.stderr
    shutil.copytree(whole.directory / "runs", cut.directory / "runs", symlinks=True)  # the first trial alone
    done = forks.run(whole, None, *arguments, command="tune")
    assert done.code == 0, done.stderr
    trials, tuned = outcome(whole)
    assert trials[1][2]["training.epochs"] == 2, "choose another seed"

    done = forks.run(cut, Moment("row", 19), *arguments, command="tune")  # the first one has 15 steps
    assert done.code == -signal.SIGKILL, done.stderr
    with locked(cut.directory / "runs/.tiny.tuning.lock", ""):
        assert forks.run(cut, None, *arguments, command="tune").code == 5
    done = forks.run(cut, Moment("row", 21, signals=(signal.SIGTERM,)), *arguments, command="tune")
    assert done.code == INTERRUPTED, done.stderr
    assert re.search("going on from step 1[5-9]", done.stderr), done.stderr
    done = forks.run(cut, None, *arguments, command="tune")
    assert done.code == 0, done.stderr
    assert outcome(cut) == (trials, tuned)
    best = max(trials, key=lambda trial: max(trial[3]))
    config = load_job(cut.file, ["training.checkpoint_every_steps=2", "seed=0"])
    assert load_job(cut.file.with_suffix(".tuned.toml")) == with_settings(config, best[2])
    # What is left: figures alone, and nothing of the job's own.
    assert not list(cut.directory.rglob("state.npz")) and not cut.run_dir.exists() and not cut.model_dir.exists()
    rows = metrics_rows(cut.directory / "runs/tiny.tuning/trials/0001")
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 31))

    cut.file.with_suffix(".tuned.toml").unlink()
    done = forks.run(cut, None, "--trials", 2, *arguments[2:], command="tune")
    assert done.code == 0 and "nothing to do" in done.stderr, done.stderr
    assert outcome(cut) == (trials, tuned)
    done = forks.run(cut, None, *arguments, "--output", cut.data_file, command="tune")
    assert done.code == 2 and "was not written by a tuning" in done.stderr
