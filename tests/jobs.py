"""Tiny but learnable jobs, and the command line run on them as a real process."""

import copy
import csv
import dataclasses
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pipeline.contract import TIMINGS

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300

LABELS = ["bad", "good"]
MAX_LENGTH = 16
VOCAB_SIZE = 340

_WORDS = {
    "bad": ["awful", "boring", "dreadful", "weak", "terrible", "dull"],
    "good": ["brilliant", "charming", "superb", "moving", "wonderful", "clever"],
}
_COMMON = ["the", "film", "story", "actor", "plot", "was", "and", "very", "with", "scene", "music", "ending", "quite"]

# Small enough for seconds, and every part of the pipeline is in it.
SETTINGS = {
    "name": "tiny",
    "seed": 3,
    "data": {"validation_fraction": 0.2, "test_fraction": 0.2},
    "tokenizer": {"vocab_size": VOCAB_SIZE},
    "model": {
        "d_model": 16,
        "num_heads": 2,
        "d_ff": 32,
        "num_layers": 1,
        "dropout": 0.1,
        "head_dropout": 0.1,
        "max_length": MAX_LENGTH,
    },
    "training": {
        "epochs": 3,
        "batch_tokens": 256,
        "learning_rate": 1e-2,
        "patience": 0,
        "checkpoint_every_steps": 3,
        "log_every_steps": 1,
    },
}


def make_rows(count=360, seed=0, flipped=0.0):
    """Returns (text, label) rows; the words of a text tell its label, except for a share of `flipped` labels."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        label = LABELS[i % 2]
        words = rng.choices(_COMMON, k=rng.randint(1, 6)) + rng.choices(_WORDS[label], k=2)
        rng.shuffle(words)
        rows.append((f"{' '.join(words)} {i}", LABELS[1 - i % 2] if rng.random() < flipped else label))
    return rows


def write_csv(path, rows, header=("text", "label")):
    """Writes rows as CSV and returns the path."""
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(header)
        writer.writerows(rows)
    return path


@dataclasses.dataclass(frozen=True)
class TinyJob:
    """A job file in its own directory, with its data; every path in it is absolute."""

    directory: Path

    @property
    def file(self):
        return self.directory / "job.toml"

    @property
    def data_file(self):
        return self.directory / "train.csv"

    @property
    def name(self):
        return SETTINGS["name"]

    @property
    def run_dir(self):
        return self.directory / "runs" / self.name

    @property
    def model_dir(self):
        return self.directory / "models" / self.name

    @property
    def report(self):
        """`evaluation/report.json`."""
        return json.loads((self.run_dir / "evaluation" / "report.json").read_text(encoding="utf-8"))

    @property
    def versions(self):
        """Names in the model directory that are numbers, sorted; none when nothing was published."""
        names = os.listdir(self.model_dir) if self.model_dir.is_dir() else []
        return sorted((name for name in names if name.isdigit()), key=int)

    def run(self, *arguments, command="run", **options):
        """Runs one command on this job; see `run_pipeline`."""
        return run_pipeline(command, self.file, *arguments, **options)

    def start(self, *arguments, command="run"):
        """Starts one command on this job; see `start_pipeline`."""
        return start_pipeline(command, self.file, *arguments)

    def leftovers(self):
        """Half-written files and directories anywhere in the run or model directory, and an unpublished candidate."""
        roots = (self.run_dir, self.model_dir)
        found = [path for root in roots for path in root.rglob(".staged-*")]
        return found + [path for path in [self.run_dir / "candidate"] if path.exists()]


def make_job(directory, rows=None, **sections):
    """Writes data and job file into `directory`.

    Args:
        directory: is made.
        rows: (text, label) pairs; None makes the usual ones.
        sections: settings over `SETTINGS`, e.g. `training={"epochs": 1}`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    job = TinyJob(directory)
    if not job.data_file.exists() or rows is not None:
        write_csv(job.data_file, make_rows() if rows is None else rows)
    settings = copy.deepcopy(SETTINGS)
    settings["work_dir"] = str(directory / "runs")
    settings["data"]["train"] = str(job.data_file)
    settings["publish"] = {"base_path": str(directory / "models")}
    for name, section in sections.items():
        if isinstance(section, dict):
            settings[name] = {**settings.get(name, {}), **section}
        else:
            settings[name] = section
    job.file.write_text(_to_toml(settings), encoding="utf-8")
    return job


def _to_toml(settings):
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not isinstance(value, dict)]
    for name, section in settings.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def error(self):
        """The only line on stderr; fails when there are more, fewer, or a traceback."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1 and "Traceback" not in self.stderr, self.stderr
        return lines[0]

    @property
    def last_line(self):
        """The last line on stderr; fails when there is none, or a traceback."""
        assert self.stderr.strip() and "Traceback" not in self.stderr, self.stderr
        return self.stderr.splitlines()[-1]


def environment():
    """Returns the environment of the processes that tests start."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def start_pipeline(*arguments, python=(), cwd=ROOT):
    """Starts `python -m pipeline ARGUMENTS` as a process; returns the `subprocess.Popen`."""
    command = [sys.executable, *python, "-m", "pipeline", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def finish(process, timeout_s=TIMEOUT_S):
    """Waits for a started command and returns `Done`; it is killed when it takes too long."""
    started = time.monotonic()
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s. stderr: {stderr}") from None
    return Done(process.returncode, stdout, stderr, time.monotonic() - started)


def run_pipeline(*arguments, python=(), cwd=ROOT, timeout_s=TIMEOUT_S):
    """Runs `python -m pipeline ARGUMENTS` to its end and returns `Done`."""
    return finish(start_pipeline(*arguments, python=python, cwd=cwd), timeout_s)


def run_script(path, *arguments, timeout_s=TIMEOUT_S):
    """Runs a Python file with the repository on its path and returns `Done`."""
    started = time.monotonic()
    command = [sys.executable, str(path), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def run_python(script, *arguments, timeout_s=TIMEOUT_S):
    """Runs a script in a fresh Python with the repository on its path; returns what it printed, as JSON."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def wait_until(condition, process, timeout_s=TIMEOUT_S):
    """Waits until `condition()` is true while `process` runs; fails when the process ends before."""
    end = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended too early, exit code {process.returncode}: {process.stderr.read()}")
        assert time.monotonic() < end, f"nothing happened in {timeout_s} s"
        time.sleep(0.01)


def metrics_rows(run_dir):
    """Returns the rows of metrics.jsonl that are complete; none when there is no file."""
    path = Path(run_dir) / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def kill_when(job, condition, number=signal.SIGKILL, command="run", *arguments):
    """Starts a command, sends it a signal once `condition()` holds, and returns `Done`."""
    process = job.start(*arguments, command=command)
    try:
        wait_until(condition, process)
    except BaseException:
        process.kill()
        raise
    process.send_signal(number)
    return finish(process)


def snapshot(directory):
    """Returns relative path -> (inode, time of change, SHA-256) of every file below `directory`."""
    root = Path(directory)
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(root))] = (status.st_ino, status.st_mtime_ns, digest)
    return found


def contents(directory):
    """Returns relative path -> SHA-256 of every file below `directory`."""
    return {path: digest for path, (_, _, digest) in snapshot(directory).items()}


def training_result(run_dir):
    """Returns (best weights: {name: array}, metrics rows without the speed): all that a resume must reproduce."""
    newest = max((Path(run_dir) / "checkpoints").iterdir())
    progress = json.loads((newest / "progress.json").read_text(encoding="utf-8"))
    assert progress["finished"]
    with np.load(Path(run_dir) / "best" / f"step-{progress['best_step']:08d}" / "state.npz") as state:
        weights = {name: state[name] for name in state.files}
    rows = [{k: v for k, v in row.items() if k not in TIMINGS} for row in metrics_rows(run_dir)]
    return weights, rows


def published_job(tmp_path_factory):
    """Returns a job that ran once without interruption; made once per test session. Leave it as it is."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of all test processes
    job = TinyJob(base / "published-job")
    with open(base / "published-job.lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        if not job.versions:
            make_job(job.directory)
            done = job.run()
            assert done.code == 0, done.stderr
    return job


def copy_trained(job, directory, keep=("data", "checkpoints", "best", "metrics.jsonl"), **sections):
    """Returns a job in `directory` on which only these parts of the run of `job` are done, and nothing is published.

    Args:
        job: a job that ran to its end.
        directory: is made.
        keep: what is copied from the run directory.
        sections: as in `make_job`; only what does not shape the weights.
    """
    rows = list(csv.reader(job.data_file.open(encoding="utf-8", newline="")))[1:]
    copied = make_job(directory, rows, **sections)
    copied.run_dir.mkdir(parents=True)
    for name in ("job.json", *keep):
        source = job.run_dir / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, copied.run_dir / name)
    return copied


def load_trained(job):
    """Returns (config, model with the best weights, tokenizer, labels, test texts); imports TensorFlow here."""
    from pipeline import dataset
    from pipeline.config import load_job
    from pipeline.job import Job
    from pipeline.runtime import start_tensorflow
    from pipeline.text import Tokenizer

    start_tensorflow()
    from pipeline.training import load_best

    config = load_job(job.file)
    data_dir = job.run_dir / "data"
    model = load_best(config, job.run_dir, Job(config, console=None).train_key)
    tokenizer = Tokenizer.load(data_dir / "tokenizer.model")
    return config, model, tokenizer, dataset.load_labels(data_dir), dataset.load_texts(data_dir, "test")
