"""Tunings whose trainings are played: what is tried, judged, remembered and written. Nothing here trains."""

import json
import re
import sys

import pytest
from optuna.distributions import CategoricalDistribution

from pipeline import tuning as tunings
from pipeline.config import load_job
from pipeline.console import Console
from pipeline.dataset import data_fingerprint
from pipeline.errors import CheckpointError, Interrupted, JobError, TrainingError
from pipeline.job import Job
from pipeline.tuning import Tuning, check_output, search_space, with_settings
from tests.jobs import make_job, make_rows, run_pipeline, write_csv

KEYS = {"key": "of all", "data_key": "of the data", "first_labels": lambda: ["bad"], "fresh": False}


class Lines(Console):
    """Keeps what would be shown."""

    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)

    result = note


def load(directory, **sections):
    return load_job(make_job(directory, make_rows(20), **sections).file)


def opened(config, **keys):
    tuning = Tuning(config, Lines())
    assert tuning.open(**{**KEYS, **keys}) == ["bad"]
    return tuning


def play(values_of, metric="accuracy"):
    """Returns a training that reports `values_of(number of the trial, its config)` or raises what is among them."""

    def train(config, run_dir, after_validation):
        (run_dir / "best").mkdir(exist_ok=True)
        for epoch, value in enumerate(values_of(int(run_dir.name), config)):
            if isinstance(value, BaseException):
                raise value
            after_validation(epoch, {"loss": -1.0, "accuracy": -1.0, metric: value})

    return train


def quality(number, config):
    """Values that depend on the settings alone, the best in the middle."""
    training, model = config.training, config.model
    top = 1.0 / (1.0 + 100 * abs(training.learning_rate - 1e-3) + model.dropout + training.label_smoothing)
    epochs = training.epochs
    return [top * (1 - 0.1 * abs(epoch - epochs // 2) / epochs) for epoch in range(epochs)]


def remembered(tuning):
    """What trials.json holds, without the times and how often a trial began."""
    trials = json.loads((tuning.path / "trials.json").read_text(encoding="utf-8"))
    return [{k: v for k, v in trial.items() if k not in ("seconds", "starts", "step")} for trial in trials]


# The search space.


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"d_model": 24, "num_heads": 3, "position": "rope", "d_ff": 65_536}},
        {"training": {"epochs": 1, "learning_rate": 1e-5, "weight_decay": 0.5, "token_dropout": 0.01}},
    ],
)
def test_the_space_holds_the_job_and_nothing_that_the_job_or_its_data_refuse(tmp_path, sections):
    config = load(tmp_path, **sections)
    space = search_space(config)
    assert ("training.token_dropout" in space) == (config.training.token_dropout > 0)
    data_key = data_fingerprint(config)
    for name, distribution in space.items():
        section, key = name.split(".")
        assert distribution._contains(distribution.to_internal_repr(getattr(getattr(config, section), key))), name
        is_choice = isinstance(distribution, CategoricalDistribution)
        for value in distribution.choices if is_choice else (distribution.low, distribution.high):
            assert data_fingerprint(with_settings(config, {name: value})) == data_key
    sizes = space["model.d_model"].choices
    assert len(sizes) > 1 and all(size % (2 * config.model.num_heads) == 0 for size in sizes)
    assert max(space["model.d_ff"].choices) <= 65_536


# The trials.


def test_the_job_comes_first_and_the_rest_is_a_function_of_the_seed(tmp_path):
    config = load(tmp_path, training={"epochs": 4})
    tuning, again = opened(config), Tuning(config, Lines())
    tuning.run(9, play(quality))
    assert tuning.trials[0]["settings"] == tuning.own
    assert len({json.dumps(trial["settings"]) for trial in tuning.trials}) == 9
    expected = remembered(tuning)
    assert {trial["state"] for trial in expected} == {"complete", "pruned"}
    assert not list(tuning.path.glob("trials/*/best"))

    again.open(**{**KEYS, "fresh": True})
    assert (tuning.path.parent / "tiny.tuning.previous" / "trials.json").exists()
    cut, signalled = set(), set()

    def cut_off(number, config):
        for epoch, value in enumerate(quality(number, config)):
            if epoch == number % config.training.epochs and number not in cut:
                cut.add(number)
                raise SystemExit  # nothing of ours catches it: like a kill, all there is is on the disk
            if number == 5 and number not in signalled:
                signalled.add(number)
                raise Interrupted("a signal")
            yield value

    for _ in range(30):
        try:
            again = opened(config)
            again.run(9, play(cut_off))
            break
        except (SystemExit, Interrupted):
            continue
    assert len(cut) >= 8 and signalled
    assert remembered(again) == expected

    output = tmp_path / "made" / "tuned.toml"
    again.finish(output)
    best = max((t for t in expected if t["state"] == "complete"), key=lambda t: max(t["values"]))
    assert load_job(output) == with_settings(config, best["settings"])
    header = output.read_text(encoding="utf-8").split("\n\n")[0]
    assert f"trial {best['number']} of {again.path}" in header and "optimistic" in header
    assert f"{max(best['values']):.6f}" in header and "9 trials (" in header
    assert sum(line.startswith("trial ") and "epochs " in line for line in again.console.lines) == 5


def test_stopped_early_is_what_is_below_the_median_at_the_same_share_of_the_training(tmp_path):
    tuning = opened(load(tmp_path, training={"epochs": 4, "patience": 2}))

    def trial(number, state, values, epochs=4):
        settings = {**tuning.own, "training.epochs": epochs}
        return {"number": number, "state": state, "settings": settings, "values": values}

    # After half of the training: 0.5, 0.6, 0.7, 0.8; the third one lost what it had, and ended by its patience.
    tuning.trials = [
        trial(0, "complete", [0.5, 0.5, 0.5, 0.5]),
        trial(1, "complete", [0.1, 0.1, 0.2, 0.6, 0.6, 0.6, 0.6, 0.6], epochs=8),
        trial(2, "complete", [0.7, 0.1, 0.1]),
        trial(3, "complete", [0.8, 0.9], epochs=2),
        trial(4, "failed", []),
        trial(5, "pruned", [0.0]),
    ]
    pruned = tuning._is_to_be_pruned
    assert pruned(trial(6, "running", [0.6, 0.64]))
    assert not pruned(trial(6, "running", [0.6, 0.66]))
    assert not pruned(trial(6, "running", [0.66, 0.0]))  # its best counts
    assert pruned(trial(6, "running", [0.1, 0.2, 0.3, 0.64], epochs=8))  # half of it, too
    assert not pruned(trial(6, "running", [0.1, 0.2], epochs=8))  # too early to tell
    assert pruned(trial(6, "running", [0.1, 0.2, 0.3], epochs=8))
    assert not pruned(trial(6, "running", [0.66], epochs=2))  # compared with the halves, not the ends of the others
    assert not pruned(trial(6, "running", [0.1, 0.1, 0.1, 0.1]))  # at its end
    assert not pruned(trial(6, "running", [0.2, 0.1, 0.1]))  # by its patience
    assert not pruned(trial(0, "running", [0.1, 0.1]))  # the job itself
    del tuning.trials[3]
    assert not pruned(trial(5, "running", [0.1, 0.2]))  # too few to compare with


def test_loss_is_better_when_it_is_lower(tmp_path):
    tuning = opened(load(tmp_path, evaluation={"metric": "loss"}))
    tuning.run(2, play(lambda number, config: [0.3, 0.5] if number else [0.4, 0.2], "loss"))
    assert [trial["number"] for trial in tuning._ranked()] == [0, 1]


def test_a_trial_that_fails_is_noted_and_the_others_go_on(tmp_path):
    def values(number, config):
        yield 0.5
        if number == 0:
            yield TrainingError("the loss is not\nfinite")
        if number == 1:
            yield MemoryError()
        if number == 2:
            yield CheckpointError("a value is not finite")

    tuning = opened(load(tmp_path))
    tuning.run(3, play(values))
    reasons = [trial["reason"] for trial in tuning.trials]
    assert reasons == ["the loss is not finite", "MemoryError", "a value is not finite"]
    with pytest.raises(TrainingError, match=re.escape("3 trials (3 failed). trial 0: the loss is not finite")):
        tuning.finish(tmp_path / "tuned.toml")
    assert not (tmp_path / "tuned.toml").exists()
    tuning.run(4, play(values))
    assert tuning.trials[3]["state"] == "complete"

    def full(*_):
        error = CheckpointError("no room")
        error.__cause__ = OSError(28, "no room")
        yield error

    with pytest.raises(CheckpointError):
        tuning.run(5, play(full))
    assert tuning.trials[4]["state"] == "running"


def test_a_trial_that_ends_its_process_each_time_fails_in_the_end(tmp_path):
    config, died = load(tmp_path), []

    def deadly(number, config):
        died.append(number)
        raise SystemExit

    for _ in range(3):
        with pytest.raises(SystemExit):
            opened(config).run(1, play(deadly))
    tuning = opened(config)
    tuning.run(1, play(deadly))
    assert died == [0, 0, 0]
    assert "3 times" in tuning.trials[0]["reason"]


def test_a_process_trains_a_few_and_leaves_the_rest_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tunings, "_TRIALS_A_PROCESS", 2)
    tuning = opened(load(tmp_path))
    for done in (2, 3):
        assert tuning.is_left(3)
        tuning.run(3, play(quality))
        assert len(tuning.trials) == done


# What is refused.


def test_another_job_or_other_data_is_refused_by_name(tmp_path):
    config = load(tmp_path)
    opened(config).run(1, play(quality))
    more = with_settings(config, {"training.epochs": 7, "model.dropout": 0.3})
    named = "model.dropout: 0.1 -> 0.3; training.epochs: 3 -> 7. Undo the change .* --fresh"
    with pytest.raises(JobError, match=named) as e:
        opened(more, key="of another")
    assert e.value.exit_code == 2
    report = {"fingerprint": "of the data", "inputs": {}}
    opened(config).data_dir.mkdir()
    (tmp_path / "runs/tiny.tuning/data/report.json").write_text(json.dumps(report), encoding="utf-8")
    with pytest.raises(JobError, match=r"data.train: .*train.csv: not there -> sha256 \w+ \(20 rows\)"):
        opened(config, key="of other", data_key="of other data")
    (tmp_path / "runs/tiny.tuning/trials.json").write_text("[", encoding="utf-8")
    with pytest.raises(JobError, match="trials.json is lost or damaged"):
        opened(config)
    assert opened(config, fresh=True).trials == []


def test_what_no_tuning_wrote_is_not_written_over(tmp_path):
    job = make_job(tmp_path, make_rows(20))
    output = tmp_path / "x.toml"
    check_output(output, job.file)
    output.write_text(tunings.HEADER + ": trial 3\n", encoding="utf-8")
    check_output(output, job.file)
    with pytest.raises(JobError, match="x.toml is there and was not written by a tuning"):
        check_output(output, output)  # of a tuned job
    for path in (job.data_file, tmp_path):
        with pytest.raises(JobError, match="stays as it is"):
            check_output(path, job.file)
    with pytest.raises(JobError, match="--output"):
        check_output(job.file / "x.toml", job.file)


def test_usage(tmp_path, monkeypatch):
    job = make_job(tmp_path, make_rows(20))
    config, output = load_job(job.file), tmp_path / "job.tuned.toml"
    done = run_pipeline("tune", job.file, "--trials", "0")
    assert done.code == 2 and done.last_line.endswith("set --trials to 1 or more."), done.stderr
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}')
    with pytest.raises(JobError, match="unset TF_CONFIG"):
        Job(config, Lines()).tune(1, output, job.file)
    monkeypatch.delenv("TF_CONFIG")
    write_csv(job.data_file, [("", "")])
    monkeypatch.delitem(sys.modules, "pipeline.tuning")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(JobError, match=re.escape("needs the package optuna. Install it: pip install '.[tune]'")):
        Job(config, Lines()).tune(1, output, job.file)
