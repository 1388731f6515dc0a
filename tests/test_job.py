"""The whole job as its users start it: `python -m pipeline`, killed, started again, published, read by a service."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from pipeline.config import load_job
from pipeline.contract import MANIFEST, Manifest, list_files, sha256_file
from pipeline.summary import describe_baseline
from pipeline.text import Tokenizer
from tests.jobs import (
    LABELS,
    contents,
    copy_trained,
    kill_when,
    make_job,
    make_rows,
    metrics_rows,
    published_job,
    run_pipeline,
    run_python,
    run_script,
    snapshot,
    training_result,
    write_csv,
)

pytestmark = pytest.mark.slow

_PREDICT = """
import json, sys
from serving.onnx_classifier import OnnxClassifier

classifier = OnnxClassifier.load(sys.argv[1])
answers = classifier.predict(json.loads(sys.argv[2]))
loaded = sorted({"tensorflow", "keras", "onnxruntime_extensions"} & set(sys.modules))
print(json.dumps({"labels": [a.label for a in answers], "probabilities": [a.probabilities for a in answers],
                  "loaded": loaded}))
"""

# Runs the command line in a process that cannot import TensorFlow.
_WITHOUT_TENSORFLOW = """
import json, sys
sys.modules["tensorflow"] = sys.modules["keras"] = None  # importing them is an ImportError
from pipeline import commands
sys.argv = ["pipeline", "run", sys.argv[1]]
try:
    commands.main()
    code = 0
except SystemExit as e:
    code = e.code or 0
print(json.dumps({"code": code}))
"""


_KILLED_AFTER_THE_RENAME = """
import os, sys
from pipeline import commands
from serving import publish

real = publish.publish
publish.publish = lambda *args: (real(*args), os._exit(9))
sys.argv = ["pipeline", "publish", sys.argv[1]]
commands.main()
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return published_job(tmp_path_factory)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The same job in another directory, killed in mid-training and run again; (job, Done of both runs)."""
    job = make_job(tmp_path_factory.mktemp("resumed"))
    killed = kill_when(job, lambda: len(metrics_rows(job.run_dir)) >= 20)
    state = {"steps": len(metrics_rows(job.run_dir)), "versions": job.versions}
    return job, killed, state, job.run()


def test_killed_job_finishes_and_publishes(resumed):
    job, killed, state, finished = resumed
    assert killed.code == -9
    assert state["versions"] == []
    assert 20 <= state["steps"] < 40, "killed too late to show anything"
    assert finished.code == 0, finished.stderr
    assert re.search(r"^going on from step [1-9]\d*, \d of 3 epochs done$", finished.stderr, re.MULTILINE)
    assert job.versions == ["1"]
    assert job.leftovers() == []


def test_killed_and_never_killed_training_are_equal_bit_for_bit(published, resumed):
    weights, rows = training_result(resumed[0].run_dir)
    expected_weights, expected_rows = training_result(published.run_dir)
    assert list(weights) == list(expected_weights)
    for name, expected in expected_weights.items():
        assert weights[name].dtype == expected.dtype
        assert weights[name].tobytes() == expected.tobytes(), name
    assert rows == expected_rows
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))  # none twice, none left out
    assert resumed[0].report["test"] == published.report["test"]


def test_metrics_rows(published):
    rows = metrics_rows(published.run_dir)
    train = [row for row in rows if row["kind"] == "train"]
    expected = {
        "kind", "step", "epoch", "loss", "learning_rate", "gradient_norm", "padded_share", "real_tokens_per_s",
        "waiting_share",
    }  # fmt: skip
    assert all(expected <= set(row) for row in train)
    validations = [row for row in rows if row["kind"] == "validation"]
    assert [row["epoch"] for row in validations] == [0, 1, 2]
    expected = {
        "kind", "step", "epoch", "loss", "accuracy", "macro_f1", "calibration_error",
        "training_s", "waiting_s", "validating_s", "saving_s",
    }  # fmt: skip
    assert all(expected <= set(row) for row in validations)
    assert all(0 <= row["padded_share"] < 1 for row in train)


def test_service_reads_the_published_version_without_tensorflow(resumed):
    texts = [text for text, _ in make_rows(40, seed=99)]
    gold = [label for _, label in make_rows(40, seed=99)]
    found = run_python(_PREDICT, resumed[0].model_dir / "1", json.dumps(texts))
    assert found["loaded"] == []
    assert np.mean([a == b for a, b in zip(found["labels"], gold, strict=True)]) >= 0.8
    for label, probabilities in zip(found["labels"], found["probabilities"], strict=True):
        assert list(probabilities) == LABELS
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-6)
        assert label == max(probabilities, key=probabilities.get)


def test_run_directory_is_complete(published):
    run_dir = published.run_dir
    for name in ("tokenizer.model", "labels.json", "report.json"):
        assert (run_dir / "data" / name).is_file()
    for split in ("train", "validation", "test"):
        assert {"tokens.npy", "offsets.npy", "labels.npy"} <= {p.name for p in (run_dir / "data" / split).iterdir()}
    resolved = json.loads((run_dir / "job.json").read_text())
    assert resolved["training"]["weight_decay"] == 1e-2  # a default, filled in
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert all(re.fullmatch(r"step-\d{8}", p.name) for p in (run_dir / "checkpoints").iterdir())
    assert len(list((run_dir / "checkpoints").iterdir())) == 3
    report = published.report
    assert report["gate"]["passed"] is True
    for split in ("validation", "test"):
        assert set(report[split]) >= {
            "accuracy", "macro_f1", "per_class", "confusion_matrix", "loss", "calibration_error", "confidence_auroc",
            "thresholds",
        }  # fmt: skip
    assert sum(map(sum, report["test"]["confusion_matrix"])) == report["test"]["rows"]
    baseline, data = report["baseline"], json.loads((run_dir / "data" / "report.json").read_text())
    assert baseline["features"] == "word 1-2-grams" and baseline["accuracy"] > 0.9  # a word tells the label
    assert baseline["fitted_rows"] == baseline["train_rows"] == data["splits"]["train"]["rows"]
    # Of the same rows: what each had right alone makes the difference.
    alone = baseline["mcnemar"]["only_ours_right"] - baseline["mcnemar"]["only_baseline_right"]
    assert baseline["difference"] == pytest.approx(report["test"]["accuracy"] - baseline["accuracy"], abs=1e-12)
    assert alone == pytest.approx(baseline["difference"] * report["test"]["rows"], abs=1e-6)


def test_manifest_describes_every_file(published):
    version_dir = published.model_dir / "1"
    manifest = Manifest.read(version_dir)
    manifest.check_files(version_dir)
    assert manifest.files == list_files(version_dir)
    assert set(manifest.files) | {MANIFEST} == {
        str(p.relative_to(version_dir)) for p in version_dir.rglob("*") if p.is_file()
    }
    assert {
        "saved_model.pb", "variables/variables.index", "assets.extra/tf_serving_warmup_requests", "onnx/model.onnx",
        "onnx/model.text.onnx", "tokenizer.model",
    } <= set(manifest.files)  # fmt: skip
    assert (manifest.name, manifest.version, manifest.labels) == ("tiny", 1, LABELS)
    assert (manifest.max_length, manifest.pad_id) == (16, 0)
    assert manifest.metrics == published.report["test"]
    assert manifest.baseline == published.report["baseline"]
    assert {"saved_model", "onnx/model.onnx", "onnx/model.text.onnx"} <= set(manifest.parity)
    assert manifest.job == load_job(published.file).portable()
    assert {"tensorflow", "keras", "tf2onnx", "onnx", "sentencepiece"} <= set(manifest.packages)


def test_summary_names_what_was_made(published, resumed):
    lines = dict(line.split(maxsplit=1) for line in resumed[3].stdout.splitlines())
    assert set(lines) == {"data", "test", "baseline", "gate", "artifacts", "parity", "published"}
    assert lines["published"].endswith("models/tiny/1")
    assert f"accuracy {published.report['test']['accuracy']:.4f}" in lines["test"]
    baseline = describe_baseline(published.report["baseline"])
    assert lines["baseline"].strip() == baseline
    assert f"\nbaseline: {baseline}\n" in resumed[3].stderr
    assert ("\nwarning: the model is " in resumed[3].stderr) is not published.report["baseline"]["better"]


def test_second_run_does_nothing_and_needs_no_tensorflow(published):
    before = snapshot(published.run_dir), snapshot(published.model_dir)
    found = run_python(_WITHOUT_TENSORFLOW, published.file)
    assert found == {"code": 0}
    done = published.run()
    assert done.code == 0
    assert "nothing to do" in done.stderr
    assert (snapshot(published.run_dir), snapshot(published.model_dir)) == before


def test_settings_that_do_not_shape_the_weights_make_no_new_run(published):
    before = contents(published.model_dir)
    settings = ["training.keep_checkpoints=7", "publish.keep_versions=9"]
    settings += ["data.allow_new_labels=true", "evaluation.max_label_shift=0.5", "baseline.enabled=false"]
    done = published.run(*(option for setting in settings for option in ("--set", setting)))
    assert done.code == 0, done.stderr
    assert "nothing to do" in done.stderr
    assert contents(published.model_dir) == before
    assert published.run().code == 0  # job.json says again what the file says


def test_stages_one_by_one_make_what_run_makes(published, forks, tmp_path):
    job = copy_trained(published, tmp_path)
    for command in ("prepare", "train", "evaluate", "export"):
        done = forks.run(job, None, command=command)
        assert done.code == 0, done.stderr
    assert job.versions == []
    assert (job.run_dir / "candidate" / MANIFEST).is_file()
    assert Manifest.read(job.run_dir / "candidate").version == 1

    # A damaged candidate is refused, and nothing of it is published.
    onnx_file = job.run_dir / "candidate" / "onnx" / "model.onnx"
    good = onnx_file.read_bytes()
    onnx_file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    done = job.run(command="publish")
    assert done.code == 1
    assert str(job.run_dir / "candidate") in done.error
    assert "python -m pipeline export" in done.error
    assert job.versions == []
    onnx_file.write_bytes(good)

    shutil.copytree(job.run_dir / "candidate", tmp_path / "kept")
    # --force records nothing where the gate lets pass; what an earlier call recorded, which then died, does not count.
    candidate = Manifest.read(job.run_dir / "candidate")
    dataclasses.replace(candidate, forced={"by": "a call before"}).write(job.run_dir / "candidate")
    done = job.run("--force", command="publish")
    assert done.code == 0, done.stderr
    assert job.versions == ["1"]
    assert job.leftovers() == []
    assert Manifest.read(job.model_dir / "1").forced == {}
    assert Manifest.read(job.model_dir / "1").metrics == Manifest.read(published.model_dir / "1").metrics

    # Killed right after the rename: it is not published twice.
    shutil.copytree(tmp_path / "kept", job.run_dir / "candidate")
    shutil.rmtree(job.model_dir)
    script = tmp_path / "killed.py"
    script.write_text(_KILLED_AFTER_THE_RENAME)
    assert run_script(script, job.file).code == 9
    assert job.versions == ["1"]
    assert job.leftovers() == [job.run_dir / "candidate"]
    done = job.run()
    assert (done.code, "nothing to do" in done.stderr) == (0, True)
    assert job.versions == ["1"]
    assert job.leftovers() == []


@pytest.mark.parametrize(("command", "first"), [("train", "prepare"), ("export", "evaluate"), ("publish", "evaluate")])
def test_stage_without_the_one_before_names_it(tmp_path, command, first):
    job = make_job(tmp_path)
    done = job.run(command=command)
    assert done.code == 1
    assert f"python -m pipeline {first}" in done.error
    assert not job.run_dir.exists()


def test_evaluate_before_train_and_publish_before_export(published, tmp_path):
    job = copy_trained(published, tmp_path / "prepared", keep=["data"])
    done = job.run(command="evaluate")
    assert (done.code, "python -m pipeline train" in done.error) == (1, True)
    job = copy_trained(published, tmp_path / "evaluated", keep=["data", "evaluation"])
    done = job.run(command="publish")
    assert (done.code, "python -m pipeline export" in done.error) == (1, True)
    assert job.versions == []


# The gate.


def test_value_below_the_minimum_is_refused_and_not_trained_again(published, forks, tmp_path):
    job = copy_trained(published, tmp_path, evaluation={"min_value": 0.999})
    before = contents(job.run_dir / "checkpoints"), (job.run_dir / "metrics.jsonl").read_bytes()
    for _ in range(2):
        done = forks.run(job, None, command="run")
        assert done.code == 4
        assert "below evaluation.min_value 0.999" in done.last_line
        assert str(job.run_dir / "evaluation" / "report.json") in done.last_line
        assert not job.model_dir.exists()
        assert job.leftovers() == []
        gate = job.report["gate"]
        assert gate["passed"] is False
        assert "evaluation.min_value" in gate["reasons"][0]
        assert gate["value"] == job.report["test"]["accuracy"] < 0.999
    assert (contents(job.run_dir / "checkpoints"), (job.run_dir / "metrics.jsonl").read_bytes()) == before
    # A lower minimum needs no training either, nor does a baseline that a report has not got.
    report = job.report
    baseline = report.pop("baseline")
    (job.run_dir / "evaluation" / "report.json").write_text(json.dumps(report))
    minimum = ("--set", "evaluation.min_value=0.5")
    done = job.run(*minimum, "--set", "baseline.enabled=false", command="evaluate")
    assert (done.code, "baseline" in done.stderr, "baseline" in job.report) == (0, False, False), done.stderr
    done = forks.run(job, None, *minimum, command="evaluate")
    assert done.code == 0, done.stderr
    assert job.report["baseline"] == baseline

    # It may be what refuses; here one that nobody beats.
    report["baseline"] = {**baseline, "accuracy": 1.0}
    (job.run_dir / "evaluation" / "report.json").write_text(json.dumps(report))
    done = job.run(*minimum, "--set", "evaluation.beat_baseline=true", command="evaluate")
    assert done.code == 4, done.stderr
    assert f"accuracy {report['test']['accuracy']:.4f} is not above 1.0000 of the baseline" in done.last_line
    assert "evaluation.beat_baseline" in job.report["gate"]["reasons"][0]


def test_worse_model_is_refused_and_let_pass_by_max_regression(published, forks, tmp_path):
    job = copy_trained(published, tmp_path)
    shutil.copytree(published.model_dir, job.model_dir)
    live = snapshot(job.model_dir)
    worse = ("--set", "training.learning_rate=1e-9", "--set", "training.epochs=1")
    done = forks.run(job, None, "--fresh", *worse, command="run")
    assert done.code == 4, done.stderr
    assert "live version 1" in done.last_line
    assert "max_regression" in done.last_line
    assert snapshot(job.model_dir) == live
    gate = job.report["gate"]
    assert gate["live"]["version"] == 1
    assert gate["live"]["value"] > gate["value"]
    assert (job.run_dir.parent / "tiny.previous" / "metrics.jsonl").is_file()

    done = forks.run(job, None, *worse, "--set", "evaluation.max_regression=1.0", command="run")
    assert done.code == 0, done.stderr
    assert job.versions == ["1", "2"]
    assert contents(job.model_dir / "1") == contents(published.model_dir / "1")
    Manifest.read(job.model_dir / "2").check_files(job.model_dir / "2")


# A job that was changed.


def test_changed_job_is_refused_while_its_run_is_unfinished(published, tmp_path):
    job = copy_trained(published, tmp_path)
    before = contents(job.run_dir)
    changes = ("--set", "training.learning_rate=0.02", "--set", "model.num_layers=2")
    done = job.run(*changes)
    assert done.code == 2
    assert "training.learning_rate: 0.01 -> 0.02" in done.error
    assert "model.num_layers: 1 -> 2" in done.error
    assert "--fresh" in done.error
    assert contents(job.run_dir) == before

    # Nor does a single stage go on from checkpoints of other settings.
    done = job.run(*changes, command="train")
    assert done.code == 2
    assert "--fresh" in done.last_line
    assert contents(job.run_dir) == before

    done = job.run(*changes, "--fresh", command="prepare")
    assert done.code == 0, done.stderr
    previous = job.run_dir.parent / "tiny.previous"
    assert contents(previous) == before
    assert not (job.run_dir / "checkpoints").exists()


def test_every_change_that_matters_is_named_with_both_values(published, tmp_path):
    job = copy_trained(published, tmp_path)
    before = contents(job.run_dir)
    changes = {
        "seed": (3, 4),
        "data.label_column": ("'label'", "'text'"),
        "data.text_column": ("'text'", "'label'"),
        "tokenizer.vocab_size": (340, 350),
        "model.d_model": (16, 32),
        "training.batch_tokens": (256, 512),
        "training.clip_norm": (1.0, 2.0),
        "training.epochs": ("3 (begun)", 2),
        "training.learning_rate": (0.01, 0.02),
        "training.precision": ("'float32'", "'mixed_bfloat16'"),
        "training.weight_decay": (0.01, 0.1),
        "evaluation.metric": ("'accuracy'", "'loss'"),
    }
    options = [option for key, (_, new) in changes.items() for option in ("--set", f"{key}={new}")]
    for command in ("run", "train"):
        done = job.run(*options, command=command)
        assert done.code == 2
        for key, (old, new) in changes.items():
            assert f"{key}: {old} -> {new}" in done.error
        assert "start over with `python -m pipeline run JOB.toml --fresh` (the old run is kept aside)" in done.error
        assert contents(job.run_dir) == before


def test_changed_data_is_refused_while_its_run_is_unfinished(published, tmp_path):
    job = copy_trained(published, tmp_path, keep=["checkpoints", "best", "metrics.jsonl"])
    assert job.run(command="prepare").code == 0
    before, old = contents(job.run_dir), sha256_file(job.data_file)
    rows = make_rows()
    write_csv(job.data_file, [(rows[0][0], "good"), *rows[1:], ("one more", "bad")])
    new = sha256_file(job.data_file)
    line = f"data.train: {job.data_file}: sha256 {old[:12]} (360 rows) -> sha256 {new[:12]} (361 rows)"
    for command in ("train", "run"):
        done = job.run(command=command)
        assert done.code == 2
        assert f"holds a run of another job, at step 45: {line}. Undo the change" in done.error
        assert "--fresh" in done.error
        assert contents(job.run_dir) == before

    done = job.run("--fresh", command="prepare")  # as `run` begins
    assert done.code == 0, done.stderr
    assert "starting a new run (new data)" in done.stderr
    assert contents(job.run_dir.parent / "tiny.previous") == before
    assert not (job.run_dir / "checkpoints").exists()


def test_moved_data_is_the_same_data_and_more_files_are_named(published, tmp_path):
    job = copy_trained(published, tmp_path)
    moved, added = tmp_path / "moved.csv", tmp_path / "more.csv"
    job.data_file.rename(moved)
    assert job.run("--set", f"data.train={moved}", command="train").code == 0
    write_csv(added, make_rows(7))
    done = job.run("--set", f"data.train={json.dumps([str(moved), str(added)])}", command="train")
    assert done.code == 2
    assert f": data.train: {added}: not there -> sha256 {sha256_file(added)[:12]} (7 rows). Undo" in done.error


def test_another_tokenizer_model_is_refused(published, tmp_path):
    model_file = tmp_path / "own.model"
    shutil.copy(published.run_dir / "data" / "tokenizer.model", model_file)
    job = make_job(tmp_path, tokenizer={"model_file": str(model_file)})
    assert job.run(command="prepare").code == 0
    shutil.copytree(published.run_dir / "checkpoints", job.run_dir / "checkpoints")
    old = sha256_file(model_file)
    other = make_job(tmp_path / "other", make_rows(200), tokenizer={"vocab_size": 320})
    assert other.run(command="prepare").code == 0
    shutil.copy(other.run_dir / "data" / "tokenizer.model", model_file)
    for command in ("run", "train"):
        done = job.run(command=command)
        assert done.code == 2
        sums = f"sha256 {old[:12]} -> {sha256_file(model_file)[:12]}"
        assert f"tokenizer.model_file: {model_file}: {sums}" in done.error


def test_more_epochs_go_on_from_a_published_job_and_make_the_next_version(published, forks, tmp_path):
    job = copy_trained(published, tmp_path, keep=_WHOLE)
    shutil.copytree(published.model_dir, job.model_dir)
    more = ("--set", "training.epochs=4", "--set", "evaluation.max_regression=1.0")
    done = forks.run(job, None, *more)
    assert done.code == 0, done.stderr
    assert "going on from step 45, 3 of 4 epochs done" in done.stderr
    assert not (job.run_dir / "evaluation" / "report.json").exists()  # it was of the weights before
    done = forks.run(job, None, *more, command="run")
    assert done.code == 0, done.stderr
    assert job.versions == ["1", "2"]
    assert Manifest.read(job.model_dir / "2").job["training"]["epochs"] == 4
    assert not (job.run_dir.parent / "tiny.previous").exists()
    assert "nothing to do" in job.run(*more).stderr
    assert job.versions == ["1", "2"]


def test_unknown_stage_of_the_command_line_leaves_no_trace(tmp_path):
    done = run_pipeline("deploy", tmp_path / "job.toml")
    assert done.code == 2
    assert "'deploy'" in done.error
    assert list(tmp_path.iterdir()) == []


# Damage between two runs.

_WHOLE = ("data", "checkpoints", "best", "metrics.jsonl", "evaluation")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({"evaluation/report.json": None, "data/report.json": None}, id="reports-lost"),
        pytest.param({"evaluation/report.json": b"{}", "job.json": b"[]", "data/report.json": b"[]"}, id="other-json"),
    ],
)
def test_a_published_job_is_done_whatever_happened_to_its_run_directory(published, tmp_path, damage):
    job = copy_trained(published, tmp_path, keep=_WHOLE)
    shutil.copytree(published.model_dir, job.model_dir)
    _damage(job.run_dir, damage)
    done = job.run()
    assert (done.code, "nothing to do" in done.stderr) == (0, True), done.stderr
    assert "published" in done.stdout
    assert job.versions == ["1"]


def test_a_job_with_hidden_and_drawn_tokens_and_a_teacher_is_published(published, forks, tmp_path):
    """Its tokenizer has a mask: the exported graphs were compared with it, on texts that name it, too."""
    teacher = shutil.copytree(published.run_dir, tmp_path / "teacher")
    rows = [(f"{text} <mask>" if i % 3 else text, label) for i, (text, label) in enumerate(make_rows())]
    training = {"token_dropout": 0.1, "subword_sampling": 0.5, "epochs": 2, "teacher": str(teacher)}
    job = make_job(tmp_path, rows, training=training)
    done = forks.run(job, None, command="run")
    assert done.code == 0, done.stderr
    assert np.load(job.run_dir / "soft_labels" / "probabilities.npy").shape[1] == len(LABELS)
    shutil.rmtree(teacher)  # what was made of it is there
    (version,) = job.versions
    manifest = Manifest.read(job.model_dir / version)
    assert "onnx/model.text.onnx" in manifest.files and not manifest.warnings
    tokenizer = Tokenizer.load(job.model_dir / version / "tokenizer.model")
    assert tokenizer.mask_id == 2
    assert 2 not in tokenizer.encode(["<mask>"])[0]
    again = job.run()
    assert (again.code, "nothing to do" in again.stderr) == (0, True), again.stderr


def test_a_lost_run_directory_does_not_publish_the_same_again(published, tmp_path):
    job = make_job(tmp_path)
    shutil.copytree(published.model_dir, job.model_dir)
    done = job.run()
    assert (done.code, "nothing to do" in done.stderr) == (0, True), done.stderr
    assert job.versions == ["1"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({"data/train/tokens.npy": None, "data/labels.json": b"{}"}, id="data"),
        pytest.param({"data/tokenizer.model": b"", "data/test/texts.jsonl": b"x"}, id="data-cut"),
        pytest.param({"metrics.jsonl": b'{"kind": "train", "step": 1}\n\xff\n'}, id="metrics"),
    ],
)
def test_a_damaged_run_directory_heals(published, forks, tmp_path, damage):
    """The training is unfinished: the newest checkpoint and the evaluation are gone."""
    job = copy_trained(published, tmp_path, keep=_WHOLE)
    shutil.rmtree(job.run_dir / "evaluation")
    shutil.rmtree(max((job.run_dir / "checkpoints").iterdir()))
    _damage(job.run_dir, damage)
    assert job.run(command="prepare").code == 0
    done = forks.run(job, None)
    assert done.code == 0, done.stderr
    weights, _ = training_result(job.run_dir)
    expected, _ = training_result(published.run_dir)
    assert {name: a.tobytes() for name, a in weights.items()} == {name: a.tobytes() for name, a in expected.items()}


def test_a_damaged_live_version_is_not_done(published, tmp_path):
    job = copy_trained(published, tmp_path, keep=_WHOLE)
    shutil.copytree(published.model_dir, job.model_dir)
    (job.model_dir / "1" / "onnx" / "model.onnx").write_bytes(b"")
    done = job.run()
    assert done.code == 4
    assert f"restore or remove {job.model_dir / '1'}" in done.stderr.splitlines()[-1]
    assert job.versions == ["1"]


def test_an_unusable_base_path_is_found_before_the_work(tmp_path):
    job = make_job(tmp_path)
    job.model_dir.parent.write_text("a file")
    done = job.run()
    assert done.code == 2
    assert "publish.base_path" in done.error
    assert not (job.run_dir / "data").exists()


def _damage(run_dir, damage):
    for name, content in damage.items():
        if content is None:
            (run_dir / name).unlink()
        else:
            (run_dir / name).write_bytes(content)


@pytest.mark.parametrize("lost", ["data", "job.json", "data/report.json"])
def test_what_names_a_change_may_be_lost_and_the_run_still_goes_on_or_is_refused(published, tmp_path, lost):
    """The checkpoints know what they were trained on."""
    job = copy_trained(published, tmp_path)
    path = job.run_dir / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(job.run_dir)
    done = job.run("--set", "training.learning_rate=0.02")
    assert done.code == 2
    assert "learning_rate: 0.01 -> 0.02" in done.error or "cannot be told, since job.json or data/" in done.error
    assert contents(job.run_dir) == before
    data = job.data_file.read_bytes()
    job.data_file.write_bytes(data + b"one more,bad\r\n")
    done = job.run()
    assert done.code == 2
    assert contents(job.run_dir) == before
    job.data_file.write_bytes(data)
    assert job.run(command="prepare").code == 0
    done = job.run(command="train")
    assert done.code == 0, done.stderr
    assert contents(job.run_dir / "checkpoints") == contents(published.run_dir / "checkpoints")
