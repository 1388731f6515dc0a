"""The search for better settings: trainings of a job with other values of some keys, judged on its validation split.

A tuning lies beside the run of the job, in `work_dir/NAME.tuning/`: `study.json` (what it is of), `data/` (prepared
once for all trials), `trials.json` (what became of each) and `trials/0007/`, the run directory of a trial. Of a trial
that is done its `metrics.jsonl` and `tensorboard/` stay, its weights go: `run` with the tuned job makes them again.

What is promised: trial 0 is the job as it stands, so that the best is never worse on validation; the test split is
never looked at; and a tuning that was killed, wherever and however often, ends with the trials, the values and the job
of one that was not, since

- the settings of trial n are a function of the job's seed, n and the trials before it: Optuna's study is made anew from
  `trials.json` for each trial, with a sampler of its own seed (Optuna's storages would keep half-done trials and the
  sampler's place would be lost; `trials.json` is written whole or not at all);
- whether a trial is stopped early is a function of its values and the trials before it;
- a trial that was cut off goes on from its checkpoints, exactly, with the settings that are noted of it.

Times are not promised, nor the outcome of a trial that the machine ends for want of memory.
"""

import dataclasses
import functools
import os
import shutil
import time
from pathlib import Path

import optuna
import pydantic
import tomli_w
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from pipeline import checkpoint, dataset
from pipeline.config import JobConfig, differences, fingerprint
from pipeline.errors import CheckpointError, Interrupted, JobError, TrainingError
from pipeline.files import locked, read_json, require_directory, write_atomic, write_json
from pipeline.identity import identity, read_record
from pipeline.seeds import derive_seed

# The search space.


@dataclasses.dataclass(frozen=True)
class Between:
    """Any value from `low` to `high`, on a logarithmic scale if `log`; the job's own value widens it."""

    low: float
    high: float
    log: bool = False

    def distribution(self, own, _):
        return FloatDistribution(min(self.low, own), max(self.high, own), log=self.log)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of `values`, or the job's own."""

    values: tuple

    def distribution(self, own, _):
        return CategoricalDistribution(sorted({*self.values, own}))


@dataclasses.dataclass(frozen=True)
class Multiple:
    """The job's own whole number times one of `factors`, to the nearest multiple of `unit`."""

    factors: tuple
    unit: int = 1

    def distribution(self, own, accepts):
        values = {max(1, round(own * factor / self.unit)) * self.unit for factor in self.factors}
        return CategoricalDistribution(sorted({own, *filter(accepts, values)}))


def search_space(config):
    """Returns key -> Optuna's distribution of its values; none of them changes the prepared data.

    Args:
        config: the `JobConfig`, whose own values are all in it.
    """
    sizes = 0.5, 1, 1.5, 2
    table = {
        "training.learning_rate": Between(1e-4, 3e-3, log=True),
        "training.weight_decay": OneOf((0.0, 1e-3, 1e-2, 3e-2, 1e-1)),
        "training.epochs": Multiple(sizes),
        "training.label_smoothing": Between(0.0, 0.2),
        "training.r_drop": OneOf((0.0, 0.5, 1.0, 2.0)),
        # Few rates: each has a table of 64 MB for as long as the process lives (pipeline/layers/dropout.py).
        "model.dropout": OneOf((0.0, 0.1, 0.2, 0.3, 0.4)),
        "model.head_dropout": OneOf((0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
        "model.d_model": Multiple(sizes, unit=2 * config.model.num_heads),  # pairs of values in each head
        "model.num_layers": Multiple(sizes),
        "model.d_ff": Multiple(sizes, unit=8),
    }
    if config.training.token_dropout:  # without, the tokenizer has no <mask>
        table["training.token_dropout"] = Between(0.02, 0.3)

    def accepts(name, value):
        try:
            with_settings(config, {name: value})
        except pydantic.ValidationError:
            return False
        return True

    return {
        name: values.distribution(_setting(config, name), functools.partial(accepts, name))
        for name, values in table.items()
    }


def with_settings(config, settings):
    """Returns a `JobConfig` with other values: `settings` is "section.key" -> value."""
    values = config.resolved()
    for name, value in settings.items():
        section, key = name.split(".")
        values[section][key] = value
    return JobConfig.model_validate(values)


def _setting(config, name):
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


# One trial after the other.

STUDY = "study.json"
TRIALS = "trials.json"
HEADER = "# Written by `python -m pipeline tune`"

# Stopped early is what is worse than the median of what trained to the end, once there are as many of those. Its rivals
# (Hyperband, successive halving) need dozens of trials before they have anything to compare.
_PRUNER = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=30)  # percent of the training
_RANDOM_TRIALS = 6  # before the sampler learns from them
_TRIALS_A_PROCESS = 10  # TensorFlow keeps some of each: 10 MB of a tiny model
_STARTS = 3  # of a trial that ends its process each time before it saves anything
_SHOWN = 5


class _Pruned(Exception):
    """The trial is worse than the median of the others."""


class Tuning:
    """The tuning of one job; use it inside `with tuning.at_work():`.

    Args:
        config: the `JobConfig`.
        console: shows notes and progress; see `pipeline.console`.
        stop: called between trials; raises Interrupted when a signal came whose exception was lost on its way.
    """

    def __init__(self, config, console, stop=lambda: None):
        self.config = config
        self.console = console
        self.stop = stop
        self.path = config.run_dir.with_name(f"{config.name}.tuning")  # no job has a dot in its name
        self.data_dir = self.path / "data"
        self.space = search_space(config)
        self.own = {name: _setting(config, name) for name in self.space}
        self.trials = []

    def at_work(self):
        """Holds the tuning's lock, which is not that of the run. Raises LockHeld when another process does."""
        name = self.config.name
        return locked(self.path.with_name(f".{name}.tuning.lock"), f"the tuning of job {name}")

    def open(self, key, data_key, first_labels, fresh):
        """Goes on with the study that is there, or begins one.

        Args:
            key: fingerprint of the data and of every setting that shapes the result.
            data_key: fingerprint of the data alone.
            first_labels: returns labels that have their index already.
            fresh: begin a new one in any case; the old one is kept aside.

        Returns:
            The labels that have their index already: those of the beginning.

        Raises:
            JobError: the study that is there is of another job or of other data.
        """
        if fresh and self.path.exists():
            aside = self.path.with_name(f"{self.path.name}.previous")
            shutil.rmtree(aside, ignore_errors=True)
            self.path.rename(aside)
            self.console.note(f"starting a new tuning (--fresh); the one before is in {aside}")
        space = {name: optuna.distributions.distribution_to_json(d) for name, d in self.space.items()}
        begun = (self.path / TRIALS).exists()
        study = read_record(self.path / STUDY, "key", "job", "space", "labels")
        if study is None and not begun:
            study = {
                "key": fingerprint(key, space), "job": self.config.resolved(), "space": space, "labels": first_labels()
            }  # fmt: skip
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / STUDY, study)
        trials = read_json(self.path / TRIALS) if begun else []
        if study is None or not isinstance(trials, list):
            raise self._another([f"what it is cannot be told, since {STUDY} or {TRIALS} is lost or damaged"])
        if study["key"] != fingerprint(key, space):
            raise self._another(self._changes(study, space, data_key))
        self.trials = trials
        for trial in self._done():
            self._remove_weights(trial)  # a kill may have come before
        return study["labels"]

    def _changes(self, study, space, data_key):
        def shaping(job):
            how_long = {key: job["training"].get(key) for key in ("epochs", "patience")}
            shaping = identity(job)
            return {**shaping, "training": {**shaping["training"], **how_long}}

        changed = differences(shaping(study["job"]), shaping(self.config.resolved()))
        if not changed:  # its bounds follow the job's own values
            changed = [f"the search space: {line}" for line in differences(study["space"], space)]
        report = read_record(self.data_dir / dataset.REPORT, "fingerprint")
        if report is not None and report["fingerprint"] != data_key:
            changed += dataset.changed_inputs(self.config, report)
        return changed or ["data: other content than when it began"]

    def _another(self, changed):
        return JobError(
            f"{self.path} holds the tuning of another job: {'; '.join(changed)}. Undo the change to go on with it, or "
            "start over with `python -m pipeline tune JOB.toml --fresh` (the old one is kept aside)."
        )

    def _done(self):
        return [trial for trial in self.trials if trial["state"] != "running"]

    def is_left(self, count):
        """True when fewer than `count` trials are done."""
        return len(self._done()) < count

    def run(self, count, train):
        """Trains until `count` trials are done, or some of them: see `is_left`. `data/` is prepared.

        Args:
            count: trials in all, those of earlier calls included.
            train: called with a `JobConfig`, its run directory and what to call after each validation; see
                `pipeline.trainer.Trainer`.

        Raises:
            Interrupted: a signal came; the state is saved.
            CheckpointError: the disk refuses a checkpoint.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        count = min(count, len(self._done()) + _TRIALS_A_PROCESS)
        while self.is_left(count):
            if len(self._done()) == len(self.trials):
                self._begin()
            self._train(self.trials[-1], train)
            self.stop()

    def _begin(self):
        number = len(self.trials)
        settings = self._suggest(number) if number else self.own
        self.trials.append({"number": number, "state": "running", "settings": settings, "values": [], "seconds": 0.0})
        self._write()

    def _write(self):
        write_json(self.path / TRIALS, self.trials)

    def _suggest(self, number):
        seed = derive_seed(self.config.seed, f"tuning/{number}")
        study = self._study(optuna.samplers.TPESampler(n_startup_trials=_RANDOM_TRIALS, seed=seed))
        found = study.ask(self.space).params
        return {name: _rounded(found[name], distribution) for name, distribution in self.space.items()}

    def _study(self, sampler=None):
        """Returns Optuna's study of the trials that are done, in memory."""
        direction = "minimize" if self.config.evaluation.metric == "loss" else "maximize"
        study = optuna.create_study(sampler=sampler, direction=direction)
        for trial in self._done():
            if trial["state"] == "complete":
                state, value = TrialState.COMPLETE, self._best(trial["values"])
            elif trial["state"] == "pruned":
                state, value = TrialState.PRUNED, None
            else:
                continue
            by_percent = self._by_percent(trial["settings"], trial["values"], state == TrialState.COMPLETE)
            study.add_trial(self._frozen(trial["settings"], by_percent, state, value))
        return study

    def _frozen(self, settings, by_percent, state, value=None):
        return optuna.trial.create_trial(
            state=state, value=value, params=settings, distributions=self.space, intermediate_values=by_percent
        )

    def _best(self, values):
        return min(values) if self.config.evaluation.metric == "loss" else max(values)

    def _by_percent(self, settings, values, is_complete=False):
        """Returns percent of the training -> best value until then; the number of epochs differs, and with it the rate.

        Args:
            settings: of the trial.
            values: the metric after each of its epochs so far.
            is_complete: it ended, by its patience if they are fewer than its epochs.
        """
        epochs = settings["training.epochs"]
        until = 100 if is_complete else 100 * len(values) // epochs
        ends = {percent: ((percent + 1) * epochs - 1) // 100 for percent in range(until + 1)}  # epochs done by then
        return {percent: self._best(values[:end]) for percent, end in ends.items() if end}

    def _is_to_be_pruned(self, trial):
        settings, values = trial["settings"], trial["values"]
        waited = len(values) - 1 - values.index(self._best(values))
        if len(values) == settings["training.epochs"] or 0 < self.config.training.patience <= waited:
            return False  # it has ended
        frozen = self._frozen(settings, self._by_percent(settings, values), TrialState.RUNNING)
        return trial["number"] > 0 and _PRUNER.prune(self._study(), frozen)

    def _train(self, trial, train):
        directory, number = self._directory(trial), trial["number"]
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "data").is_symlink():
            (directory / "data").symlink_to(os.path.relpath(self.data_dir, directory))
        self.console.note(f"trial {number}: {self._describe(trial['settings'])}")
        started, before = time.monotonic(), trial["seconds"]

        def write(**entries):
            trial.update(entries, seconds=before + time.monotonic() - started)
            self._write()

        def after_validation(epoch, figures):
            write(values=[*trial["values"][:epoch], figures[self.config.evaluation.metric]])
            if self._is_to_be_pruned(trial):
                raise _Pruned

        try:
            write(**self._count_start(trial))
            train(with_settings(self.config, trial["settings"]), directory, after_validation)
            end = {"state": "complete"}
        except _Pruned:
            end = {"state": "pruned"}
        except Interrupted:
            write(starts=0)
            raise
        except (TrainingError, CheckpointError, MemoryError) as e:
            if isinstance(e.__cause__, OSError):  # the disk's fault
                raise
            end = {"state": "failed", "reason": " ".join(str(e).split())[:300] or type(e).__name__}
        write(**end)
        self._remove_weights(trial)
        self.console.note(f"trial {number}: {self._outcome(trial)}, in {trial['seconds']:.0f} s")

    def _count_start(self, trial):
        """Returns how often a trial began at the step that it begins at now; raises TrainingError when too often."""
        progress = checkpoint.newest_progress(checkpoint.where_it_stands(self._directory(trial)))
        step = 0 if progress is None else progress.step
        starts = trial.get("starts", 0) if trial.get("step") == step else 0
        if starts == _STARTS:
            raise TrainingError(f"it ended the process {_STARTS} times before it saved anything more (out of memory?)")
        return {"step": step, "starts": starts + 1}

    def _directory(self, trial):
        return self.path / "trials" / f"{trial['number']:04d}"

    def _remove_weights(self, trial):
        for name in (checkpoint.CHECKPOINTS, checkpoint.BEST, checkpoint.PRETRAINING):
            shutil.rmtree(self._directory(trial) / name, ignore_errors=True)

    # What it came to.

    def finish(self, output):
        """Prints a table of the best trials and writes the job of the best to `output`, a complete job file.

        Raises:
            TrainingError: no trial was trained to its end.
            JobError: none was begun.
        """
        if not self._done():
            raise JobError(f"{self.path} holds no trial yet, and none was asked for: set --trials to 1 or more.")
        ranked, metric = self._ranked(), self.config.evaluation.metric
        if not ranked:
            reasons = [f"trial {t['number']}: {t['reason']}" for t in self._done() if t["state"] == "failed"]
            raise TrainingError(f"no job was written: {self._counts()}. {reasons[0]}")
        self.console.result(f"{self._counts()}; the best by {metric} on validation:")
        for trial in ranked[:_SHOWN]:
            self.console.result(
                f"trial {trial['number']:>3}  {self._best(trial['values']):.4f}  {len(trial['values']):>3} epochs"
                f"  {trial['seconds']:>6.0f} s  {self._describe(trial['settings'])}"
            )
        best = ranked[0]
        lines = [
            f"{HEADER}: trial {best['number']} of {self.path}, the best of {self._counts()}.",
            f"# Its {metric} on validation is {self._best(best['values']):.6f}: an optimistic figure, since it was",
            "# chosen by it. No trial has seen the test rows: `run` with this file tells what the settings are worth.",
        ]
        job = with_settings(self.config, best["settings"]).resolved()
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, "\n".join(lines) + "\n\n" + tomli_w.dumps(job))
        self.console.result(f"the job of trial {best['number']} is in {output}")

    def _ranked(self):
        """Returns the trials that were trained to their end, the best first; of equal ones the earlier."""
        sign = 1 if self.config.evaluation.metric == "loss" else -1
        complete = [trial for trial in self.trials if trial["state"] == "complete"]
        return sorted(complete, key=lambda trial: sign * self._best(trial["values"]))

    def _counts(self):
        states = [trial["state"] for trial in self._done()]
        parts = [f"{states.count(s)} {word}" for s, word in _STATES.items() if s in states]
        return f"{len(states)} trials ({', '.join(parts)})"

    def _outcome(self, trial):
        epochs = trial["settings"]["training.epochs"]
        ended = f"{_STATES[trial['state']]} after {len(trial['values'])} of {epochs} epochs"
        if trial["state"] == "failed":
            return f"{ended}: {trial['reason']}"
        return f"{self.config.evaluation.metric} {self._best(trial['values']):.4f} on validation, {ended}"

    def _describe(self, settings):
        differing = [f"{name}={value}" for name, value in settings.items() if value != self.own[name]]
        return " ".join(differing) or "the job as it stands"


_STATES = {"complete": "finished", "pruned": "stopped early", "failed": "failed"}


def check_output(output, job_file):
    """Raises JobError when `output` cannot be written, or is a file that no tuning wrote."""
    output = Path(output)
    require_directory(output.parent, "--output")
    if not os.path.lexists(output):
        return
    is_ours = output.is_file() and not output.samefile(job_file)
    if is_ours:
        with open(output, encoding="utf-8", errors="replace") as f:
            is_ours = f.readline().startswith(HEADER)
    if not is_ours:
        raise JobError(
            f"{output} is there and was not written by a tuning: it stays as it is. Move it away, or give another file "
            "with --output."
        )


def _rounded(value, distribution):
    """Three digits are enough of a number that was drawn."""
    if not isinstance(distribution, FloatDistribution):
        return value
    return min(max(float(f"{value:.3g}"), distribution.low), distribution.high)
