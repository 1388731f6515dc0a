import gzip
import json
import shutil

import numpy as np
import pytest

from pipeline import teachers
from pipeline.config import JobConfig
from pipeline.errors import DataError, JobError
from pipeline.identity import changes
from pipeline.job import Job

TEXTS = ["one", "two", "one", "drei \ufffd"]
LABELS = ["bad", "good", "so so"]


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def answer(text, **probabilities):
    return {"text": text, "probabilities": probabilities}


def make_run(directory, labels=("bad", "good"), best=b"of state.npz"):
    """What tells a finished run: no weights are looked at."""
    (directory / "best" / "step-00000007").mkdir(parents=True)
    (directory / "best" / "step-00000007" / "SHA256SUMS").write_bytes(best)
    last = directory / "checkpoints" / "step-00000009"
    last.mkdir(parents=True)
    (last / "progress.json").write_text(json.dumps({"key": "k", "step": 9, "best_step": 7}))
    (last / "SHA256SUMS").write_text(teachers.checkpoint._sum_line(last, "progress.json"))
    (directory / "data").mkdir()
    (directory / "data" / "labels.json").write_text(json.dumps(labels))
    (directory / "evaluation").mkdir()
    (directory / "evaluation" / "report.json").write_text('{"test": {}}')
    return directory


@pytest.fixture
def run_dir(tmp_path):
    """A student's, prepared."""
    (tmp_path / "run" / "data" / "train").mkdir(parents=True)
    (tmp_path / "run" / "data" / "labels.json").write_text(json.dumps(LABELS))
    texts = tmp_path / "run" / "data" / "train" / "texts.jsonl"
    texts.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    return tmp_path / "run"


@pytest.fixture
def file(tmp_path):
    return write_lines(
        tmp_path / "answers.jsonl",
        answer("two", good=0.4, bad=0.6005),
        answer("another", good=1),
        answer("one", good=0.0, bad=1.0),
        answer("drei \ud800", **{"so so": 1}),
        answer("one", good=1.0),  # the last counts
    )


def test_answers_are_found_by_their_text(file, tmp_path):
    expected = [[0, 1, 0], [0.6005 / 1.0005, 0.4 / 1.0005, 0], [0, 1, 0], [0, 0, 1]]
    found = teachers.read_answers(file, TEXTS, LABELS)
    np.testing.assert_allclose(found, expected, atol=1e-12, rtol=0)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as f:
        f.write((tmp_path / "answers.jsonl").read_bytes())
    np.testing.assert_array_equal(teachers.read_answers(f"{tmp_path}/a.jsonl.gz", TEXTS, LABELS), found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            answer("x", good=0.5, bad=0.502),
            r"line 2: probabilities must be .* sum 1 \(within 0.001\). Received: .*0.502",
        ),
        (answer("x", good=1.5, bad=-0.5), "line 2: probabilities must be finite, not negative"),
        (answer("x", good=float("nan"), bad=1.0), "line 2: probabilities must be finite"),
        (answer("x", good=True), "line 2: probabilities must be"),
        (answer("x", good="1"), "line 2: probabilities must be"),
        (answer("x"), "line 2: probabilities must be"),
        (answer("x", Good=1.0), "line 2: .*Unknown: 'Good'. Known labels: 'bad', 'good', 'so so'"),
        ({"text": "x", "good": 1.0}, 'line 2: must be {"text"'),
        ({"text": 3, "probabilities": {"good": 1.0}}, 'line 2: must be {"text"'),
        ([1], "line 2: not a JSON object"),
        (answer("one", good=1.0), "no answer to 2 of 3 training texts, the first is 'two'. Let training.teacher"),
    ],
)
def test_answers_that_cannot_be_used(tmp_path, line, message):
    path = write_lines(tmp_path / "a.jsonl", answer("one", bad=1.0), line)
    with pytest.raises(DataError, match=message) as e:
        teachers.read_answers(path, TEXTS, LABELS)
    assert str(e.value).startswith(path) and "\n" not in str(e.value)


def test_soft_labels_are_the_mean_and_are_kept(run_dir, file, tmp_path):
    other, asked = make_run(tmp_path / "teacher", ["good", "bad"]), []

    def of_run(directory, texts):
        asked.append((directory, texts))
        return ["good", "bad"], np.array([[0.25, 0.75]] * 4)

    setting = [file, str(other)]
    found = teachers.soft_labels(setting, run_dir, "key", of_run)
    expected = (teachers.read_answers(file, TEXTS, LABELS) + [0.75, 0.25, 0]) / 2
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-7, rtol=0)
    assert asked == [(other, TEXTS)]
    # Not asked again, even when they are gone; unless it is another training, or what was kept is damaged.
    kept = teachers.digests(setting, run_dir)
    shutil.rmtree(other)
    np.testing.assert_array_equal(teachers.soft_labels(setting, run_dir, "key", None), found)
    assert teachers.digests(setting, run_dir) == kept == teachers.recorded(run_dir)
    for key, damage in (("another", b""), ("key", b"x")):
        with open(run_dir / "soft_labels" / "probabilities.npy", "ab") as f:
            f.write(damage)
        with pytest.raises(JobError, match="teacher cannot be used: it is neither|it does not exist"):
            teachers.soft_labels(setting, run_dir, key, of_run)
    with pytest.raises(DataError, match="Unknown: 'new'"):
        teachers.soft_labels(str(make_run(other)), run_dir, "k", lambda *_: (["new"], np.ones((4, 1))))


def test_a_digest_follows_the_content_and_not_the_path(run_dir, file, tmp_path):
    def digests(*paths):
        return list(teachers.digests([str(path) for path in paths], run_dir).values())

    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    moved = shutil.copy(file, tmp_path / "moved.jsonl")
    assert digests(one, file) == digests(two, moved) and len(set(digests(one, file))) == 2
    others = [make_run(tmp_path / "3", ["good", "bad"]), make_run(tmp_path / "4", best=b"of others")]
    assert len(set(digests(one, *others))) == 3
    assert teachers.digests("", run_dir) == {} and list(teachers.digests(str(one), run_dir)) == [str(one)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "does not exist. Name run directories whose training is finished, or files"),
        (lambda path: path.with_suffix(".jsonl"), "No such file or directory. Name run directories"),
        (lambda path: path.mkdir() or path, "holds no finished run"),
        (lambda path: shutil.rmtree(make_run(path) / "evaluation") or path, "holds no finished run"),
        (lambda path: shutil.rmtree(make_run(path) / "best") or path, "has lost its best weights"),
        (lambda path: path.with_name("run"), "is the run directory of this job itself"),
        (lambda path: path.with_name("run") / "data" / "labels.json", "neither a directory nor a .jsonl"),
    ],
)
def test_what_is_no_teacher(run_dir, tmp_path, make, message):
    with pytest.raises(JobError, match=message) as e:
        teachers.digests(str(make(tmp_path / "x")), run_dir)
    assert str(e.value).startswith("training.teacher=") and "\n" not in str(e.value)


def test_a_training_depends_on_its_teachers_answers(run_dir, file, tmp_path):
    def job(teacher):
        config = JobConfig.model_validate(
            {"name": "run", "work_dir": str(tmp_path), "data": {"train": "t.csv"}, "training": {"teacher": teacher}}
        )
        found = Job(config, console=None)
        found.data_key = "data"
        return found

    assert job(file).train_key == job([file]).train_key != job("").train_key
    teachers.soft_labels(file, run_dir, job(file).train_key, None)
    taught = job(file).train_key
    (run_dir / "job.json").write_text(json.dumps(job(file).config.resolved()))
    moved = str(shutil.copy(file, tmp_path / "moved.jsonl"))
    (tmp_path / "answers.jsonl").unlink()
    assert job(file).train_key == job(moved).train_key == taught
    write_lines(tmp_path / "moved.jsonl", answer("one", good=1.0))
    assert job(moved).train_key != taught
    old, new = (teachers.digests(path, run_dir)[path][:12] for path in (file, moved))
    assert changes(job(moved).config, run_dir, "data", job(moved).train_key)[0] == [
        f"training.teacher: {file} (sha256 {old}) -> {moved} (sha256 {new})"
    ]
    assert changes(job("").config, run_dir, "data", "")[0] == [f"training.teacher: {file} (sha256 {old}) -> none"]
