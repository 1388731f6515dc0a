"""What users get wrong: one plain line that names place and remedy, the right exit code, nothing left behind."""

import os
import re

import pytest
import sentencepiece

from tests.jobs import contents, make_job, make_rows, run_pipeline, run_python, write_csv

# Each command must end before TensorFlow would even be imported; that takes seconds.
QUICK_S = 10

_MODULES = """
import json, sys
from pipeline import commands
sys.argv = ["pipeline", "run", sys.argv[1]]
try:
    commands.main()
    code = 0
except SystemExit as e:
    code = e.code or 0
print(json.dumps({"code": code, "loaded": sorted({"tensorflow", "keras"} & set(sys.modules))}))
"""


def _refused(job, code, *needed, arguments=()):
    """Runs the job, checks how it ended and what it left, and returns its one line."""
    done = job.run(*arguments, timeout_s=60)
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert done.seconds < QUICK_S
    assert done.error.startswith("error: ")
    for part in needed:
        assert part in done.error
    _assert_nothing_left(job)
    return done.error


def _assert_nothing_left(job):
    left = sorted(p.name for p in job.run_dir.iterdir()) if job.run_dir.exists() else []
    assert left in ([], ["job.json"])
    assert not job.model_dir.parent.exists()
    assert job.leftovers() == []


def _job_with_data(tmp_path, data, name="train.csv", **sections):
    path = tmp_path / name
    path.write_bytes(data)
    return make_job(tmp_path, data={"train": str(path)}, **sections)


# Usage and the job file.


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ([], "Missing command"),
        (["frobnicate", "job.toml"], "'frobnicate'"),
        (["run"], "JOB.toml"),
        (["run", "job.toml", "--nope"], "--nope"),
        (["run", "nowhere.toml"], "nowhere.toml"),
        (["run", "."], "cannot read job file ."),
    ],
)
def test_wrong_usage(tmp_path, arguments, needed):
    done = run_pipeline(*arguments, cwd=tmp_path)
    assert done.code == 2
    assert needed in done.error
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_help_is_no_error(tmp_path):
    done = run_pipeline("--help", cwd=tmp_path)
    assert done.code == 0
    assert "publish" in done.stdout


@pytest.mark.parametrize(
    ("content", "needed"),
    [
        (b"name = ", "is not valid TOML"),
        (b"name = 'x'\nname = 'y'\n[data]\ntrain = 'a.csv'", "is not valid TOML"),
        (b"\xff\xfe", "cannot read job file"),
        (b"", "'name' is missing"),
        (b"name = 'x'", "'data' is missing"),
        (b"[data]\ntrain = 'a.csv'", "'name' is missing"),
        (b"name = 'Movie Reviews'\n[data]\ntrain = 'a.csv'", "[a-z0-9-]+"),
        (b"name = 'x'\nmodel = 3\n[data]\ntrain = 'a.csv'", "[model]"),
    ],
)
def test_unusable_job_file(tmp_path, content, needed):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    done = run_pipeline("run", path, cwd=tmp_path)
    assert done.code == 2
    assert needed in done.error
    assert str(path) in done.error
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ("model.num_head=4", ["'model.num_head'", "'model.num_heads'"]),
        ("learning_rate=1e-3", ["'learning_rate'", "'training.learning_rate'"]),
        ("trainning.epochs=3", ["'trainning'", "'training'"]),
        ("model.d_model=15", ["d_model=15", "num_heads=2"]),
        ("model.num_heads=3", ["d_model=16", "num_heads=3"]),
        ("model.dropout=1.0", ["model.dropout", "1.0"]),
        ("model.num_layers=0", ["model.num_layers", "0"]),
        ("training.epochs='3'", ["training.epochs", "'3'"]),
        ("training.learning_rate=0", ["training.learning_rate"]),
        ("training.learning_rate=nan", ["training.learning_rate"]),
        ("training.precision=float8", ["training.precision", "float32"]),
        ("data.validation_fraction=0.0", ["validation_fraction=0.0"]),
        ("data.test_fraction=0.95", ["test_fraction=0.95"]),
        ("evaluation.metric=f1", ["evaluation.metric", "macro_f1"]),
        ("evaluation.max_regression=-0.1", ["evaluation.max_regression"]),
        ("export.precisions=['int8']", ["float32"]),
        ("export.opset=17", ["export.opset", "20"]),
        ("publish.keep_versions=0", ["publish.keep_versions"]),
        ("tokenizer.vocab_size=7", ["tokenizer.vocab_size"]),
        ("seed=-1", ["seed"]),
        ("epochs", ["--set needs section.key=value"]),
    ],
)
def test_unknown_key_or_value_out_of_range(tmp_path, setting, needed):
    job = make_job(tmp_path)
    _refused(job, 2, *needed, arguments=["--set", setting])
    assert not job.run_dir.exists()


# Data.


def test_missing_data_file(tmp_path):
    job = make_job(tmp_path, data={"train": str(tmp_path / "nothing.csv")})
    _refused(job, 3, str(tmp_path / "nothing.csv"), "No such file")


def test_glob_without_a_match(tmp_path):
    job = make_job(tmp_path, data={"train": str(tmp_path / "part-*.csv")})
    _refused(job, 3, "part-*.csv", "matches no file")


def test_directory_as_data_file(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    job = make_job(tmp_path, data={"train": str(tmp_path / "folder.csv")})
    _refused(job, 3, str(tmp_path / "folder.csv"), "directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_data_file(tmp_path):
    job = make_job(tmp_path)
    job.data_file.chmod(0)
    _refused(job, 3, str(job.data_file), "Permission denied")


def test_unknown_suffix(tmp_path):
    _refused(_job_with_data(tmp_path, b"x", "train.xlsx"), 3, "train.xlsx", ".csv")


@pytest.mark.parametrize(
    ("data", "needed"),
    [
        (b"", ["train.csv", "is empty"]),
        (b"\n\n", ["train.csv", "is empty"]),
        (b"text,label\n", ["train.csv", "has no rows"]),
        (b"review,stars\nfine,5\n", ["train.csv", "'text'", "'review'", "'stars'", "data.text_column"]),
        (b"text,stars\nfine,5\n", ["train.csv", "'label'", "'stars'", "data.label_column"]),
        (b"text,label\na fine film,good\nanother one,good\n", ["fewer than two classes", "'good'"]),
        (b"text,label\n  ,good\n\t,bad\n", ["fewer than two classes"]),
        (b"text,label\nfine,good\nbad, really bad,bad\n", ["train.csv, line 3", "3 fields", "header has 2"]),
        (b"text,label\nfine,good\ncaf\xe9,bad\n", ["train.csv, line 3", "not valid UTF-8"]),
        (b'text,label\nfine,good\n"never closed,bad\n', ["train.csv, line 3"]),
        (b"text,label\nfine,good\nnot so fine,\n", ["train.csv, line 3", "no label"]),
    ],
)
def test_unusable_data(tmp_path, data, needed):
    _refused(_job_with_data(tmp_path, data), 3, *needed)


@pytest.mark.parametrize(
    ("data", "needed"),
    [
        (None, ["more.csv", "No such file"]),
        (b"", ["more.csv", "is empty"]),
        (b"text\n", ["more.csv", "has no rows"]),
        (b"body,label\nfine,good\n", ["more.csv", "no column 'text'", "'body', 'label'", "data.text_column"]),
        (b"text\n \n", ["data.unlabelled has no text of its own: each of its 1 rows is blank"]),
    ],
)
def test_unusable_unlabelled_data(tmp_path, data, needed):
    path = tmp_path / "more.csv"
    if data is not None:
        path.write_bytes(data)
    _refused(make_job(tmp_path, data={"unlabelled": str(path)}, pretraining={"epochs": 1}), 3, *needed)


def test_too_few_rows_for_the_splits(tmp_path):
    _refused(_job_with_data(tmp_path, b"text,label\nfine,good\npoor,bad\n"), 3, "Give more rows")


def test_refused_data_can_be_corrected_without_fresh(tmp_path):
    """The remedy that the error names works in the same run directory."""
    write_csv(tmp_path / "train.csv", make_rows(), header=("review", "label"))
    job = make_job(tmp_path)
    _refused(job, 3, "data.text_column")
    done = job.run("--set", "data.text_column=review", command="prepare")
    assert done.code == 0, done.stderr


def test_damaged_data_leaves_what_was_prepared_before(tmp_path):
    job = make_job(tmp_path)
    assert job.run(command="prepare").code == 0
    before = contents(job.run_dir)
    job.data_file.unlink()
    done = job.run()
    assert (done.code, str(job.data_file) in done.error) == (3, True)
    assert contents(job.run_dir) == before


# The tokenizer.


def test_vocabulary_larger_than_the_corpus_allows(tmp_path):
    job = make_job(tmp_path)
    line = _refused(job, 2, "tokenizer.vocab_size=5000", arguments=["--set", "tokenizer.vocab_size=5000"])
    largest = int(re.search(r"at most (\d+)", line)[1])
    _refused(job, 2, f"at most {largest}", arguments=["--set", f"tokenizer.vocab_size={largest + 1}"])
    done = job.run("--set", f"tokenizer.vocab_size={largest}", command="prepare")
    assert done.code == 0, done.stderr
    assert f"vocabulary {largest}" in done.stderr


def test_vocabulary_smaller_than_the_characters_need(tmp_path):
    job = make_job(tmp_path)
    line = _refused(job, 2, "tokenizer.vocab_size=100", arguments=["--set", "tokenizer.vocab_size=100"])
    smallest = int(re.search(r"at least (\d+)", line)[1])
    _refused(job, 2, f"at least {smallest}", arguments=["--set", f"tokenizer.vocab_size={smallest - 1}"])
    done = job.run("--set", f"tokenizer.vocab_size={smallest}", command="prepare")
    assert done.code == 0, done.stderr


@pytest.mark.parametrize("content", [None, b"", b"no model at all", b"\x00" * 100])
def test_tokenizer_file_that_is_no_model(tmp_path, content):
    path = tmp_path / "own.model"
    if content is not None:
        path.write_bytes(content)
    job = make_job(tmp_path, tokenizer={"model_file": str(path)})
    _refused(job, 2, str(path), "SentencePiece model")
    assert not job.run_dir.exists()


def test_tokenizer_file_with_other_special_ids(tmp_path):
    path = tmp_path / "own.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text, _ in make_rows()),
        model_prefix=str(path.with_suffix("")),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    job = make_job(tmp_path, tokenizer={"model_file": str(path)})
    _refused(job, 2, str(path), "pad id 0", "--pad_id=0", "Received: pad_id=-1, unk_id=0")


# The machine.


def test_work_dir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    job = make_job(tmp_path, work_dir=str(tmp_path / "file" / "runs"))
    done = job.run()
    assert done.code == 1
    assert str(tmp_path / "file") in done.error


def test_no_tensorflow_is_loaded_to_refuse(tmp_path):
    job = _job_with_data(tmp_path, b"text,label\nfine,good\n")
    assert run_python(_MODULES, job.file) == {"code": 3, "loaded": []}


def test_debug_shows_the_traceback(tmp_path):
    done = make_job(tmp_path, data={"train": str(tmp_path / "nothing.csv")}).run("--debug")
    assert done.code == 3
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
