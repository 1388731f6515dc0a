"""The gate in whole jobs: what it refuses, and when; what --force records; labels from version to version."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest

from pipeline.contract import Manifest
from pipeline.dataset import load_labels
from serving.onnx_classifier import OnnxClassifier
from tests.jobs import contents, copy_trained, make_rows, published_job, run_script, snapshot, write_csv

pytestmark = pytest.mark.slow

_WHOLE = ("data", "checkpoints", "best", "metrics.jsonl", "evaluation", "run.json")

# The model's answers that the artifacts are compared with are not the model's.
_UNVERIFIED = """
import sys
from export import verify
from pipeline import commands

real = verify.write_cases
verify.write_cases = lambda path, predict, *rest: real(path, lambda token_ids: predict(token_ids) + 0.01, *rest)
sys.argv = ["pipeline", "run", *sys.argv[1:]]
commands.main()
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return published_job(tmp_path_factory)


def _with_live(published, directory, keep=_WHOLE):
    job = copy_trained(published, directory, keep)
    shutil.copytree(published.model_dir, job.model_dir)
    return job


def _rows(path):
    return list(csv.reader(path.open(encoding="utf-8", newline="")))[1:]


def _assert_refused_unseen(job, done, live, *needed):
    """Before anything was trained, and without a trace in the model directory."""
    assert done.code == 4, done.stderr
    assert snapshot(job.model_dir) == live
    assert not (job.run_dir / "checkpoints").exists()
    assert "test" not in job.report and job.report["gate"]["passed"] is False
    for part in needed:
        assert part in done.last_line
        assert any(part in reason for reason in job.report["gate"]["reasons"])


def test_labels_and_data_from_version_to_version(published, forks, tmp_path):
    job = _with_live(published, tmp_path)
    live = snapshot(job.model_dir)
    first = _rows(job.data_file)

    # More rows, and a label that sorts before the others.
    second = make_rows(480) + [(f"unclear undecided {text}", "aside") for text, _ in make_rows(120, seed=5)]
    write_csv(job.data_file, second)
    done = job.run()
    assert "starting a new run (new data)" in done.stderr
    _assert_refused_unseen(job, done, live, "'aside': set data.allow_new_labels = true")

    # Without them there is nothing to do, as before.
    write_csv(job.data_file, first)
    done = job.run()
    assert (done.code, "nothing to do" in done.stderr) == (0, True), done.stderr
    assert snapshot(job.model_dir) == live
    shown = [line.split()[0] for line in done.stdout.splitlines()]
    # No data and gate: those here are of the refused week.
    assert shown == ["test", "baseline", "artifacts", "parity", "published"]

    write_csv(job.data_file, second)
    done = forks.run(job, None, "--set", "data.allow_new_labels=true", command="run")
    assert done.code == 0, done.stderr
    assert job.versions == ["1", "2"]
    assert contents(job.model_dir / "1") == contents(published.model_dir / "1")
    manifest = Manifest.read(job.model_dir / "2")
    assert manifest.labels == ["bad", "good", "aside"]
    assert list(manifest.label_counts) == manifest.labels and min(manifest.label_counts.values()) > 50
    assert manifest.forced == {}
    texts, gold = zip(*make_rows(60, seed=99), strict=True)
    both = [OnnxClassifier.load(job.model_dir / version).probabilities(texts) for version in job.versions]
    for probabilities in both:  # the columns of before are in their place
        assert np.mean(probabilities[:, :2].argmax(axis=1) == [manifest.labels.index(label) for label in gold]) > 0.8
    gate = job.report["gate"]
    assert (gate["artifact"], gate["live"]["version"]) == ("onnx/model.onnx", 1)
    assert gate["live"]["value"] == job.report["live"]["metrics"]["accuracy"] < gate["value"]
    assert (job.run_dir.parent / "tiny.previous").is_dir()
    assert job.leftovers() == []

    # A class is lost, and with it the shares move.
    live = snapshot(job.model_dir)
    write_csv(job.data_file, [row for row in second if row[1] != "good"])
    done = job.run()
    _assert_refused_unseen(job, done, live, "no training row is left of 'good'", "evaluation.max_label_shift 0.2")
    done = job.run(command="prepare")
    assert done.code == 0, done.stderr
    assert "warning: the gate will refuse to publish: no training row is left of 'good'" in done.stderr

    # The data of the first week, which lacks a class by now, by force. The class keeps its column.
    write_csv(job.data_file, first)
    force = ("--force", "--set", "evaluation.max_regression=1.0")
    done = forks.run(job, None, *force, command="run")
    assert done.code == 0, done.stderr
    assert job.versions == ["1", "2", "3"]
    manifest = Manifest.read(job.model_dir / "3")
    manifest.check_files(job.model_dir / "3")
    assert manifest.labels == ["bad", "good", "aside"]
    assert manifest.label_counts["aside"] == 0
    assert manifest.forced == job.report["gate"]["forced"]
    reasons = "; ".join(manifest.forced["reasons"])
    assert reasons.startswith("no training row is left of 'aside', which live version 2 was trained on")
    assert "@" in manifest.forced["by"]
    assert f"warning: --force: going on although the gate refuses: {reasons}" in done.stderr
    assert f"gate  refused: {reasons}; published by {manifest.forced['by']} with --force at 2" in done.stderr
    assert "nothing to do" in job.run(*force).stderr
    assert job.versions == ["1", "2", "3"]


def test_what_is_not_verified_is_refused_even_by_force(published, tmp_path):
    job = _with_live(published, tmp_path)
    live = snapshot(job.model_dir)
    script = tmp_path / "unverified.py"
    script.write_text(_UNVERIFIED)
    other_export = ("--set", "export.precisions=['float32']")
    done = run_script(script, job.file, "--force", *other_export)
    assert done.code == 4, done.stderr
    assert "exported artifacts differ from the trained model and were deleted: saved_model" in done.last_line
    assert "onnx/model.onnx" in job.report["gate"]["reasons"][0] and job.report["gate"]["passed"] is False
    assert job.report["test"] == published.report["test"]
    assert snapshot(job.model_dir) == live
    assert job.leftovers() == []

    # Nor is the live version measured again for the same rows: what is known of it is used, here a lie.
    path = job.run_dir / "evaluation" / "report.json"
    report = job.report
    report["live"]["metrics"]["accuracy"] = 2.0
    path.write_text(json.dumps(report))
    done = job.run(*other_export)
    assert done.code == 4, done.stderr
    assert "worse than 2.0000 of live version 1" in done.last_line


def test_the_order_of_a_runs_labels_is_fixed_once_it_trains(published, tmp_path):
    assert json.loads((published.run_dir / "run.json").read_text()) == {"labels": ["bad", "good"]}
    job = _with_live(published, tmp_path, ["checkpoints", "best", "metrics.jsonl", "run.json"])
    manifest = json.loads((job.model_dir / "1" / "manifest.json").read_text())
    manifest["labels"], manifest["export_key"] = ["good", "bad"], "of another job"
    (job.model_dir / "1" / "manifest.json").write_text(json.dumps(manifest))
    data_dir = job.run_dir / "data"

    # `data/` is lost, and another version is live by now.
    live = snapshot(job.model_dir)
    done = job.run()
    assert done.code == 4
    assert "label indices would change their meaning (2 of 2, e.g. 0 from 'good' in live version 1" in done.last_line
    assert load_labels(data_dir) == ["bad", "good"]
    assert contents(data_dir / "train") == contents(published.run_dir / "data" / "train")
    assert snapshot(job.model_dir) == live
    assert job.run(command="train").code == 0

    # The gate's report does not make the run a finished one, which another job may replace.
    shutil.rmtree(max((job.run_dir / "checkpoints").iterdir()))
    assert job.run().code == 4
    before = contents(job.run_dir)
    done = job.run("--set", "training.learning_rate=0.5")
    assert (done.code, "holds a run of another job" in done.last_line) == (2, True)
    assert contents(job.run_dir) == before

    # But other data may: nobody waits for the training of what is refused.
    kept = shutil.copytree(job.run_dir, tmp_path / "kept")
    write_csv(job.data_file, [(text, "good" if i % 9 else "bad") for i, (text, _) in enumerate(make_rows(400))])
    done = job.run()
    assert (done.code, "starting a new run (new data)" in done.stderr) == (4, True), done.stderr
    assert "evaluation.max_label_shift" in done.last_line
    shutil.rmtree(job.run_dir)
    shutil.move(kept, job.run_dir)
    write_csv(job.data_file, make_rows())

    # With all records of the order lost, none is guessed.
    shutil.rmtree(data_dir)
    (job.run_dir / "run.json").unlink()
    done = job.run(command="prepare")
    assert (done.code, "--fresh" in done.error) == (2, True)
    assert "run.json and data/ are lost or damaged" in done.error

    # A run that begins anew takes the live version's order, if that can be read.
    done = job.run("--fresh", command="prepare")
    assert done.code == 0, done.stderr
    assert load_labels(data_dir) == ["good", "bad"]
    assert "the gate will refuse" not in done.stderr
    (job.model_dir / "1" / "manifest.json").write_text("{}")
    done = job.run(command="prepare")
    assert done.code == 1
    assert "cannot be told" in done.last_line and f"Restore or remove {job.model_dir / '1'}" in done.last_line


def test_a_refusal_does_not_unfinish_a_finished_run(published, tmp_path):
    """More epochs for it are refused, since another version is live by now; another job may still replace it."""
    job = _with_live(published, tmp_path)
    path = job.model_dir / "1" / "manifest.json"
    other = {"labels": ["good", "bad"], "export_key": "of another job"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))
    done = job.run("--set", "training.epochs=4")
    assert (done.code, "label indices would change" in done.last_line) == (4, True), done.stderr
    done = job.run("--set", "training.learning_rate=0.5", command="prepare")
    assert (done.code, "starting a new run (a changed job)" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize("left", ["nothing", "an empty directory"])
def test_a_new_run_that_was_stopped_as_it_began_is_still_new(published, tmp_path, left):
    """The data of the week before last again: its version does not count, though nothing but `.previous` says so."""
    job = _with_live(published, tmp_path)
    later = shutil.copytree(job.model_dir / "1", job.model_dir / "2")
    manifest = Manifest.read(later)
    dataclasses.replace(manifest, version=2, export_key="of last week").write(later)
    job.run_dir.rename(job.run_dir.with_name("tiny.previous"))
    if left != "nothing":
        job.run_dir.mkdir()
    done = job.run(command="prepare")
    assert done.code == 0, done.stderr
    assert json.loads((job.run_dir / "run.json").read_text()) == {"above_version": 1}
