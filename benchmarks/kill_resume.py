"""Kills trainings at random moments, runs them again, and compares what they come to with a run that was never killed.

    .venv/bin/python benchmarks/kill_resume.py --kills 100
    .venv/bin/python benchmarks/kill_resume.py --kills 0 --signals 50

Prints one JSON object. Exit code 1: a result differs, or a signal did not end as it must. It makes its own tiny job
in a temporary directory. A kill costs two to ten seconds.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline import checkpoint  # noqa: E402
from pipeline.errors import Interrupted  # noqa: E402
from tests.jobs import make_job, make_rows, metrics_rows  # noqa: E402
from tests.kills import STRUCK, Forks, Moment, differing, result, run_process, where_it_stands  # noqa: E402

_NAMES = {
    "time": "anywhere, imports too",
    "compile": "from the start of training to the first step",
    "file": "at a file operation",
    "row": "after a step: in the next one, a save or a validation",
}
GRACE_S = 30  # a signalled process has saved and ended by then


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs to spend, over as many runs as it takes")
    parser.add_argument("--signals", type=int, default=0, help="SIGTERMs and SIGINTs to spend after them")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as directory, Forks(directory) as forks:
        trial = _Trial(Path(directory), forks, random.Random(options.seed))
        report = {"seed": options.seed, "steps_per_run": trial.steps, "cpus": os.cpu_count()}
        if options.kills:
            report |= trial.kill(options.kills)
        if options.signals:
            report["signals"] = trial.signal(options.signals)
    print(json.dumps(report, indent=2))
    return 1 if trial.failures else 0


class _Trial:
    """One job, its undisturbed result, and disturbed runs of it one after the other."""

    def __init__(self, directory, forks, rng):
        self.forks, self.rng, self.failures = forks, rng, []
        # Long enough that a kill lands inside every part: 3 epochs of 37 steps, 180 rows to validate.
        self.job = make_job(directory / "job", make_rows(900))
        self._run(None, "prepare")
        shutil.copytree(self.job.run_dir / "data", directory / "data")
        self.data = directory / "data"
        self._run(None, "train")
        self.expected = result(self.job.run_dir)
        self.epoch_ends = [row["step"] for row in self.expected["metrics.jsonl"] if row["kind"] == "validation"]
        self.steps = self.epoch_ends[-1]
        self._start_over()

    def kill(self, kills):
        """Spends `kills` SIGKILLs; returns the figures."""
        count, found, lost, runs, resumes, twice = 0, collections.Counter(), [], 1, 0, 0
        before = None
        while count < kills:
            resumed_at = self._saved_step()
            resumes += resumed_at > 0
            done = self._disturb(self._moment((signal.SIGKILL,)))
            if done.code == 0:
                self._compare()
                self._start_over()
                runs, before = runs + 1, None
                continue
            if done.code != -signal.SIGKILL:
                self._fail(f"exit code {done.code}: {done.stderr[-500:]}")
            count += 1
            found[where_it_stands(self.job.run_dir, self.epoch_ends)] += 1
            twice += before == resumed_at
            before = resumed_at
            rows = metrics_rows(self.job.run_dir)
            saved = checkpoint.newest_progress(self.job.run_dir / checkpoint.CHECKPOINTS)
            lost.append(max(0, rows[-1]["step"] - (saved.step if saved else 0)) if rows else 0)
        self._finish()
        return {
            "kills": count,
            "runs": runs,
            "resumes": resumes,
            "steps_lost": {"total": sum(lost), "largest": max(lost)},
            "twice_within_one_checkpoint_interval": twice,
            "killed": dict(found.most_common()),
            "mismatches": len(self.failures),
            "failures": self.failures,
        }

    def signal(self, signals):
        """Spends `signals` SIGTERMs and SIGINTs, half of them followed by another; returns the figures."""
        failures_before = len(self.failures)
        count, found, seconds, runs = 0, collections.Counter(), [], 1
        while count < signals:
            numbers = self.rng.choices([signal.SIGTERM, signal.SIGINT], k=self.rng.choice([1, 2, 5]))
            (self.job.directory / "runs" / STRUCK).unlink(missing_ok=True)
            moment = self._moment(tuple(numbers), gap_s=self.rng.uniform(0, 0.1))
            done = self._disturb(moment)
            ended = time.time()
            if done.code == Interrupted.exit_code:
                count += 1
                found[_NAMES[moment.kind]] += 1
                seconds.append(ended - (self.job.directory / "runs" / STRUCK).stat().st_mtime)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            if done.code not in (0, Interrupted.exit_code) or (done.code != 0) != len(errors):
                self._fail(f"exit code {done.code}: {done.stderr[-500:]}")
            if "Traceback" in done.stderr or "Exception ignored" in done.stderr:
                self._fail(f"not one plain line: {done.stderr[-500:]}")
            if self.job.leftovers():
                self._fail(f"left behind: {self.job.leftovers()}")
            if done.code == 0:
                self._compare()
                self._start_over()
                runs += 1
        self._finish()
        if max(seconds) > GRACE_S:
            self._fail(f"{max(seconds):.1f} s passed from the first signal to the end")
        return {
            "interrupted": count,
            "runs": runs,
            "signalled": dict(found.most_common()),
            "seconds_to_exit": {"median": sorted(seconds)[count // 2], "largest": max(seconds)},
            "mismatches": len(self.failures) - failures_before,
            "failures": self.failures[failures_before:],
        }

    def _moment(self, signals, gap_s=0.0):
        rng, saved = self.rng, self._saved_step()
        ahead = next((step for step in self.epoch_ends if step > saved), self.steps)
        kinds = {
            "time": lambda: Moment("time", delay_s=rng.uniform(0, 8), signals=signals, gap_s=gap_s),
            "compile": lambda: Moment("compile", delay_s=rng.uniform(0, 1.5), signals=signals, gap_s=gap_s),
            "file": lambda: Moment("file", rng.randint(1, 60), signals=signals, gap_s=gap_s),
            "row": lambda: Moment("row", saved + rng.randint(1, 12), rng.uniform(0, 0.02), signals, gap_s),
            "end": lambda: Moment("row", ahead, rng.uniform(0, 0.05), signals, gap_s),
        }
        return kinds[rng.choice(list(kinds))]()

    def _disturb(self, moment):
        # A process of its own imports TensorFlow, so that signals land there too.
        run = run_process if moment.kind == "time" else self.forks.run
        return run(self.job, moment, "--set", f"training.checkpoint_every_steps={self.rng.choice([2, 5, 10, 0])}")

    def _saved_step(self):
        saved = checkpoint.newest_progress(self.job.run_dir / checkpoint.CHECKPOINTS)
        return 0 if saved is None or saved.finished else saved.step

    def _run(self, moment, command="train"):
        done = self.forks.run(self.job, moment, command=command)
        if done.code:
            raise SystemExit(f"{command} failed: {done.stderr}")

    def _finish(self):
        self._run(None)
        self._compare()
        self._start_over()

    def _compare(self):
        parts = differing(result(self.job.run_dir), self.expected)
        if parts:
            self._fail(f"differs from the run that was never disturbed: {', '.join(parts[:10])}")

    def _start_over(self):
        shutil.rmtree(self.job.run_dir)
        shutil.copytree(self.data, self.job.run_dir / "data")

    def _fail(self, what):
        print(what, file=sys.stderr)
        self.failures.append(what)


if __name__ == "__main__":
    sys.exit(main())
