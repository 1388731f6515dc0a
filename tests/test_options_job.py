"""A job with every option at once, from unlabelled texts to the published version: killed on the way, and run again."""

import signal

import numpy as np
import pytest

from pipeline.contract import ONNX_FILES, ONNX_TEXT, Manifest
from pipeline.fitting import FITTED
from serving.onnx_classifier import OnnxClassifier
from tests.jobs import make_job, make_rows, metrics_rows, write_csv
from tests.kills import Moment, differing, result
from tests.options import OPTIONS

pytestmark = pytest.mark.slow


def make_whole_job(directory):
    directory.mkdir(exist_ok=True)
    unlabelled = [(text, "") for text, _ in make_rows(60, seed=8)]
    job = make_job(
        directory,
        data={"unlabelled": str(directory / "unlabelled.csv")},
        model={**OPTIONS["together"], "num_heads": 4, "num_layers": 1, "ngram_pairs": 256},
        pretraining={"epochs": 1},
        training={"recompute": True, "token_dropout": 0.1, "epochs": 2},
    )
    write_csv(directory / "unlabelled.csv", unlabelled)
    return job


def test_every_option_at_once(forks, tmp_path):
    job, other = make_whole_job(tmp_path), make_whole_job(tmp_path / "other")
    done = forks.run(job, None, command="run")
    assert done.code == 0, done.stderr
    assert "unlabelled" in done.stderr
    kinds = {row["kind"] for row in metrics_rows(job.run_dir)}
    assert kinds == {"pretraining", "pretraining_validation", "train", "validation"}

    manifest = Manifest.read(job.model_dir / "1")
    assert {ONNX_FILES["float32"], ONNX_TEXT} <= set(manifest.files)
    assert manifest.graphs[ONNX_FILES["float32"]]["activation_products"] == 4  # of a layer with global tokens
    exact = [manifest.parity[name]["max_abs_difference"] for name in ("saved_model", ONNX_FILES["float32"], ONNX_TEXT)]
    assert max(exact) < 1e-4
    assert manifest.calibration == job.report["calibration"]
    assert job.report["parts"].keys() == {"encoder", "ngrams"}
    answers = OnnxClassifier.load(job.model_dir / "1").predict(["a superb film", "a dull film", ""])
    np.testing.assert_allclose([sum(a.probabilities.values()) for a in answers], 1.0, atol=1e-5)

    assert "nothing to do" in forks.run(job, None, command="run").stderr
    assert forks.run(other, None, command="prepare").code == 0
    for step in (4, 20):  # in the pretraining, which has 19 steps, and in the training
        assert forks.run(other, Moment("row", step)).code == -signal.SIGKILL
    assert forks.run(other, None).code == 0
    assert differing(result(other.run_dir), result(job.run_dir)) == []
    assert forks.run(other, None, command="evaluate").code == 0
    fitted, expected = ((run.run_dir / FITTED).read_bytes() for run in (other, job))
    assert fitted == expected
    assert {**other.report, "gate": None} == {**job.report, "gate": None}
