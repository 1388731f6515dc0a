"""A version is the same wherever and whenever it is exported, and needs nothing but its own directory."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.contract import MANIFEST, Manifest
from tests.jobs import ROOT, contents, copy_trained, environment, published_job, run_pipeline, run_python

pytestmark = pytest.mark.slow

TEXTS = ["a superb film", "", "dull\0and weak", "很好 \U0001f600"]

_ONNX = """
import json, sys
from serving.onnx_classifier import OnnxClassifier
texts = json.loads(sys.argv[2])
print(json.dumps(OnnxClassifier.load(sys.argv[1]).probabilities(texts).tolist()))
"""
_SAVED_MODEL = """
import json, sys
import tensorflow as tf
import tensorflow_text
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
print(json.dumps(serve(text=tf.constant(json.loads(sys.argv[2])))["probabilities"].numpy().tolist()))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return published_job(tmp_path_factory)


@pytest.fixture(scope="module")
def moved(job, tmp_path_factory):
    """The same model exported again, by another process, elsewhere, without the input files; all but it is gone."""
    place = tmp_path_factory.mktemp("elsewhere")
    copied = copy_trained(job, place / "copy", keep=("data", "checkpoints", "best", "evaluation"))
    copied.data_file.unlink()
    (place / "cwd").mkdir()
    done = run_pipeline("export", copied.file, cwd=place / "cwd")
    assert done.code == 0, done.stderr
    shutil.move(copied.run_dir / "candidate", place / "moved")
    shutil.rmtree(copied.directory)
    return place / "moved"


def _differing(first, second):
    return {file for file, _ in set(contents(first).items()) ^ set(contents(second).items())}


def test_two_exports_differ_in_the_time_alone(job, moved):
    """One was made by the process that trained, the other by one that read the checkpoint."""
    versions = job.model_dir / "1", moved
    assert _differing(*versions) == {MANIFEST}
    first, second = (dataclasses.asdict(Manifest.read(version)) for version in versions)
    assert first.pop("created") < second.pop("created")
    assert first == second


def test_no_file_names_a_place_of_this_machine(job):
    places = {str(job.directory), str(ROOT), sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(Path.home())}
    for file in contents(job.model_dir / "1"):
        data = (job.model_dir / "1" / file).read_bytes()
        assert [place for place in places if place != "/" and f"{place}/".encode() in data] == [], file
        assert b"site-packages" not in data, file


@pytest.fixture(scope="module")
def expected(job):
    return run_python(_ONNX, job.model_dir / "1", json.dumps(TEXTS))


@pytest.fixture
def link(moved, tmp_path):
    (tmp_path / "link").symlink_to(moved)
    return tmp_path / "link"


@pytest.mark.parametrize("script", [_ONNX, _SAVED_MODEL], ids=["onnx", "saved-model"])
def test_moved_and_behind_a_link_it_answers_as_before(link, expected, script):
    np.testing.assert_allclose(run_python(script, link, json.dumps(TEXTS)), expected, rtol=0, atol=1e-5)


def test_moved_and_behind_a_link_it_predicts(link, expected, tmp_path):
    command = [sys.executable, "-m", "serving", "predict", "--model", "link", TEXTS[0]]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    probabilities = list(json.loads(done.stdout)["probabilities"].values())
    np.testing.assert_allclose(probabilities, expected[0], rtol=0, atol=1e-5)
