"""Trainings that end at a chosen moment: by SIGKILL, or by signals that they must survive.

A process can be armed to signal itself at the n-th file operation in its run directory, some time after a row of
metrics.jsonl, while it compiles, or at any time; so a seeded test hits the inside of a save every time. `Forks` starts
such processes from one that has imported TensorFlow, which saves most of their time.
"""

import dataclasses
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from pipeline import checkpoint
from pipeline.contract import TIMINGS
from tests.jobs import ROOT, TIMEOUT_S, Done, environment, metrics_rows

STRUCK = "struck"  # beside the run directory; changed when a process is about to signal itself


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a training is signalled.

    Attributes:
        kind: "file": at the `number`-th file operation below the run directory once training has begun; "row":
            `delay_s` after the row of step `number`, or after the first one later than it; "compile": `delay_s` after
            training has begun, and at the first row at the latest; "time": `delay_s` after the start.
        number: see `kind`.
        delay_s: see `kind`.
        signals: sent one after the other.
        gap_s: time between two of them.
    """

    kind: str
    number: int = 0
    delay_s: float = 0.0
    signals: tuple = (signal.SIGKILL,)
    gap_s: float = 0.0


# The process that is signalled.


def _arm(moment, run_dir):
    """Makes this process signal itself at `moment` of the training in `run_dir`."""
    run_dir, operations, training = str(run_dir), itertools.count(1), threading.Event()

    def strike():
        (Path(run_dir).parent / STRUCK).touch()
        for i, number in enumerate(moment.signals):
            time.sleep(moment.gap_s if i else 0)
            os.kill(os.getpid(), number)

    def strike_later():
        timer = threading.Timer(moment.delay_s, strike)
        timer.daemon = True
        timer.start()

    def on_event(event, arguments):
        # Every look at the file system that Python makes: open, os.rename, os.mkdir, os.remove, ...
        if not training.is_set() or not arguments or not str(arguments[0]).startswith(run_dir):
            return
        if next(operations) == moment.number:
            strike()

    def on_training():
        training.set()
        if moment.kind == "compile":
            strike_later()

    def on_row(row):
        if not training.is_set() or row["kind"] not in ("train", "pretraining"):
            return
        if moment.kind == "compile":
            strike()
        elif moment.kind == "row" and row["step"] >= moment.number:
            training.clear()  # once
            strike_later()

    if moment.kind == "time":
        strike_later()
        return
    _tell_of_training(on_training, on_row)
    if moment.kind == "file":
        sys.addaudithook(on_event)


def _tell_of_training(on_training, on_row):
    """Calls `on_training` when the record of a training opens, and `on_row` after each of its rows."""
    from pipeline.record import Record

    opened, added = Record.__enter__, Record.add

    def __enter__(self):
        on_training()
        return opened(self)

    def add(self, row):
        added(self, row)
        on_row(row)

    Record.__enter__, Record.add = __enter__, add


def _run(request):
    if request["moment"]:
        _arm(Moment(**request["moment"]), request["run_dir"])
    sys.argv = ["pipeline", *request["command"]]
    runpy.run_module("pipeline", run_name="__main__")


def _serve():
    """Forks a process for every line of stdin; answers with its id, and with its exit code once it has ended."""
    from pipeline.runtime import start_tensorflow

    start_tensorflow()
    # So that the forked processes have them.
    import export.bundle  # noqa: F401
    import pipeline.commands
    import pipeline.training  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            stderr = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stderr, 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(stderr, 1)
            _run(request)
            sys.exit()
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


# The process that looks on.


def _request(job, moment, arguments, command):
    moment = moment and dataclasses.asdict(moment)
    return {"moment": moment, "run_dir": str(job.run_dir), "command": [command, str(job.file), *map(str, arguments)]}


def run_process(job, moment, *arguments, command="train"):
    """Runs one command on a job in a process of its own, signalled at `moment` (None: never); returns `Done`."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills", json.dumps(_request(job, moment, arguments, command))],
        cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


class Forks:
    """Runs commands as `run_process` does, in processes forked from one that has imported TensorFlow.

    Args:
        directory: for a file that holds what the processes print.
    """

    def __init__(self, directory):
        self._stderr = Path(directory) / "stderr"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.kills", "serve"],
            cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._server.stdin.close()
        self._server.wait(TIMEOUT_S)

    def run(self, job, moment, *arguments, command="train"):
        """As `run_process`."""
        started = time.monotonic()
        request = _request(job, moment, arguments, command) | {"stderr": str(self._stderr)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        self._server.stdout.readline()
        code = int(self._server.stdout.readline())
        return Done(code, "", self._stderr.read_text(encoding="utf-8"), time.monotonic() - started)


def where_it_stands(run_dir, epoch_ends):
    """Names the moment at which a training in `run_dir` died, from what lies there.

    Args:
        run_dir: the run directory.
        epoch_ends: steps after which a validation is due.
    """
    for folder, name in ((checkpoint.BEST, "while the best weights were saved"), (checkpoint.CHECKPOINTS, "in a save")):
        if list((run_dir / folder).glob(".staged-*")):
            return name
    rows = metrics_rows(run_dir)
    saved = checkpoint.newest_progress(run_dir / checkpoint.CHECKPOINTS)
    if saved is not None and saved.finished:
        return "after the end"
    if not rows or saved is not None and rows[-1]["step"] == saved.step:
        return "before the first step"
    if rows[-1]["kind"] == "validation":
        return "between validation and save"
    return "in a validation" if rows[-1]["step"] in epoch_ends else "in a step"


def result(run_dir):
    """Returns all that a training came to, comparable bit for bit: part -> value. Figures of time are left out."""
    newest = checkpoint.steps(run_dir / checkpoint.CHECKPOINTS)[-1]
    last = checkpoint.read(run_dir / checkpoint.CHECKPOINTS, newest)
    best = checkpoint.read(run_dir / checkpoint.BEST, last.progress.best_step)
    rows = [{k: v for k, v in row.items() if k not in TIMINGS} for row in metrics_rows(run_dir)]
    pretraining = run_dir / checkpoint.PRETRAINING / checkpoint.CHECKPOINTS
    before = [checkpoint.read(pretraining, step) for step in checkpoint.steps(pretraining)[-1:]]
    return {
        # The digits of the times are part of the record's length.
        "progress": dataclasses.replace(last.progress, metrics_bytes=0),
        "best progress": dataclasses.replace(best.progress, metrics_bytes=0),
        "metrics.jsonl": rows,
        **{f"state, {name}": (a.dtype, a.shape, a.tobytes()) for name, a in last.arrays.items()},
        **{f"pretraining, {name}": a.tobytes() for found in before for name, a in found.arrays.items()},
        **{f"best, {name}": (a.dtype, a.shape, a.tobytes()) for name, a in best.arrays.items()},
    }


def differing(found, expected):
    """Returns the parts in which two results differ."""
    return [part for part in {**found, **expected} if found.get(part) != expected.get(part)]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve()
    else:
        _run(json.loads(sys.argv[1]))
