import csv
import json
import re

import numpy as np
import pytest

from pipeline import dataset
from pipeline.config import JobConfig
from pipeline.errors import DataError, JobError
from pipeline.splitting import split_rows
from pipeline.summary import describe_rows
from pipeline.text import Tokenizer, pad, train_tokenizer
from tests.pipeline.test_splitting import from_rows, make_texts
from tests.pipeline.test_text import foreign_model

TEXTS = make_texts(300)
LABELS = ["pos" if i % 3 else "neg" for i in range(300)]


def write_csv(path, texts, labels):
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows([("text", "label"), *zip(texts, labels, strict=True)])
    return str(path)


def make_job(tokenizer=None, max_length=16, training=None, pretraining=None, **data):
    return JobConfig.model_validate(
        {
            "name": "t",
            "data": data,
            "tokenizer": tokenizer or {"vocab_size": 320},
            "model": {"max_length": max_length},
            "training": training or {},
            "pretraining": pretraining or {},
        }
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared")
    job = make_job(train=write_csv(directory / "train.csv", ["", *TEXTS], ["neg", *LABELS]))
    return job, directory / "data", dataset.prepare(job, directory / "data")


def test_prepare_writes_what_the_contract_names(prepared):
    _, data_dir, report = prepared
    assert sorted(p.relative_to(data_dir).as_posix() for p in data_dir.rglob("*") if p.is_file()) == sorted(
        ["tokenizer.model", "labels.json", "report.json"]
        + [f"{s}/texts.jsonl" for s in ("train", "validation", "test")]
        + [f"{s}/{a}.npy" for s in ("train", "validation", "test") for a in ("tokens", "offsets", "labels", "rows")]
    )
    assert dataset.load_labels(data_dir) == ["neg", "pos"]
    assert dataset.load_report(data_dir) == report == json.loads((data_dir / "report.json").read_text())


def test_every_row_is_in_one_split_with_its_own_tokens_and_label(prepared):
    job, data_dir, _ = prepared
    tokenizer = Tokenizer.load(data_dir / "tokenizer.model")
    expected = tokenizer.encode(TEXTS, job.model.max_length)
    seen = []
    for name in ("train", "validation", "test"):
        split = dataset.Split.load(data_dir, name)
        assert (split.tokens.dtype, split.offsets.dtype, split.labels.dtype, split.rows.dtype) == (
            np.int32,
            np.int64,
            np.int32,
            np.int64,
        )
        assert len(split) == len(split.lengths) == len(split.rows)
        for i, row in enumerate(split.rows - 1):  # the blank first row has number 0
            np.testing.assert_array_equal(split.tokens[split.offsets[i] : split.offsets[i + 1]], expected[row])
            assert ["neg", "pos"][split.labels[i]] == LABELS[row]
        assert dataset.load_texts(data_dir, name) == [TEXTS[row - 1] for row in split.rows]
        seen += split.rows.tolist()
    assert sorted(seen) == list(range(1, 301))


def test_the_tokenizer_learns_from_the_training_split_only(prepared):
    job, data_dir, report = prepared
    train = [TEXTS[row - 1] for row in dataset.Split.load(data_dir, "train").rows]
    assert Tokenizer.load(data_dir / "tokenizer.model").model == train_tokenizer(train, job.tokenizer.vocab_size)
    assert report["vocab_size"] == 320


def test_report_counts(prepared):
    job, data_dir, report = prepared
    assert report["sources"] == {"train": {"files": [job.data.train], "rows": 301, "blank": 1}}
    assert sum(split["rows"] for split in report["splits"].values()) == 300
    split = report["splits"]["test"]
    rows = dataset.Split.load(data_dir, "test").rows - 1
    lengths = np.array([len(r) for r in Tokenizer.load(data_dir / "tokenizer.model").encode([TEXTS[i] for i in rows])])
    assert split["labels"] == {name: sum(LABELS[i] == name for i in rows) for name in ("neg", "pos")}
    assert split["shares"]["neg"] == pytest.approx(split["labels"]["neg"] / split["rows"], abs=1e-6)
    assert split["length"]["max"] == lengths.max() > 16  # before the cut
    assert split["length"]["mean"] == pytest.approx(lengths.mean(), abs=0.01)
    assert split["truncated_share"] == pytest.approx((lengths > 16).mean(), abs=1e-6)
    assert np.mean(lengths <= split["length"]["p90"]) >= 0.9
    assert split["tokens"] == np.minimum(lengths, 16).sum()
    assert any("longer than model.max_length=16" in warning for warning in report["warnings"])


def test_token_ids_are_the_padded_rows(prepared):
    split = dataset.Split.load(prepared[1], "train")
    for indices in ([5, 0, 7, 7], [3], np.arange(len(split))):
        rows = [split.tokens[split.offsets[i] : split.offsets[i + 1]] for i in indices]
        token_ids = split.token_ids(indices)
        assert token_ids.dtype == np.int32
        np.testing.assert_array_equal(token_ids, pad(rows))
    assert split.token_ids([]).shape == (0, 1)


def test_split_of_rows_without_tokens(tmp_path):
    for name, array in {
        "tokens": np.zeros(0, np.int32),
        "offsets": np.zeros(3, np.int64),
        "labels": np.zeros(2, np.int32),
        "rows": np.arange(2),
    }.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.testing.assert_array_equal(dataset.Split.load(tmp_path, ".").token_ids([0, 1]), [[0], [0]])


def test_prepare_does_nothing_the_second_time(prepared, monkeypatch):
    job, data_dir, report = prepared
    monkeypatch.setattr(dataset, "read_table", None)
    assert dataset.prepare(job, data_dir) == report


def test_equal_inputs_give_equal_files(prepared, tmp_path):
    job, data_dir, _ = prepared
    dataset.prepare(job, tmp_path / "again")
    for path in data_dir.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(data_dir)).read_bytes()


def test_the_fingerprint_follows_content_and_settings_not_paths(tmp_path):
    write_csv(tmp_path / "a.csv", TEXTS, LABELS)
    (tmp_path / "b.csv").write_bytes((tmp_path / "a.csv").read_bytes())
    first = dataset.data_fingerprint(make_job(train=f"{tmp_path}/a.csv"))
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert dataset.data_fingerprint(make_job(train=[f"{tmp_path}/b.csv"])) == first
    others = [
        make_job(train=f"{tmp_path}/a.csv", max_length=17),
        make_job(train=f"{tmp_path}/a.csv", tokenizer={"vocab_size": 321}),
        make_job(train=f"{tmp_path}/a.csv", tokenizer={"vocab_size": 320, "case_folding": True}),
        make_job(train=f"{tmp_path}/a.csv", test_fraction=0.2),
        make_job(train=f"{tmp_path}/a.csv", label_column="other"),
        make_job(train=f"{tmp_path}/a.csv", test=f"{tmp_path}/b.csv"),
        make_job(train=[f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]),
    ]
    # A matter of the gate, not of the data.
    assert dataset.data_fingerprint(make_job(train=f"{tmp_path}/a.csv", allow_new_labels=True)) == first
    digests = {dataset.data_fingerprint(job) for job in others}
    write_csv(tmp_path / "a.csv", TEXTS[:-1], LABELS[:-1])
    digests.add(dataset.data_fingerprint(make_job(train=f"{tmp_path}/a.csv")))
    assert len(digests | {first}) == len(others) + 2


def test_the_fingerprint_of_a_report_needs_no_input_file(tmp_path):
    files = [write_csv(tmp_path / name, TEXTS[i::2], LABELS[i::2]) for i, name in enumerate(("b.csv", "a.csv"))]
    (tmp_path / "own.model").write_bytes(foreign_model())
    for tokenizer in ({"vocab_size": 300}, {"model_file": f"{tmp_path}/own.model"}):
        job = make_job(train=files, tokenizer=tokenizer)
        report = dataset.prepare(job, tmp_path / "data")
        gone = make_job(train=[path.replace(str(tmp_path), "/gone") for path in files], tokenizer=tokenizer)
        assert dataset.data_fingerprint(gone, report) == dataset.data_fingerprint(job) == report["fingerprint"]
        others = make_job(train=files, tokenizer=tokenizer, max_length=17), make_job(train=files, test_fraction=0.2)
        assert report["fingerprint"] not in [dataset.data_fingerprint(other, report) for other in others]
    (tmp_path / "own.model").unlink()
    assert dataset.data_fingerprint(job, report) == report["fingerprint"]


def test_changed_data_replaces_the_directory_and_a_failure_leaves_it(tmp_path):
    job = make_job(train=write_csv(tmp_path / "a.csv", TEXTS, LABELS))
    first = dataset.prepare(job, tmp_path / "data")
    write_csv(tmp_path / "a.csv", TEXTS, ["neg"] * 300)
    with pytest.raises(DataError):
        dataset.prepare(job, tmp_path / "data")
    assert dataset.load_report(tmp_path / "data") == first
    write_csv(tmp_path / "a.csv", TEXTS[:250], LABELS[:250])
    assert dataset.prepare(job, tmp_path / "data")["fingerprint"] != first["fingerprint"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "data"]


def test_files_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    job = make_job(train=write_csv(tmp_path / "a.csv", TEXTS, LABELS))
    train = dataset.train_tokenizer

    def train_while_the_file_grows(*args, **options):
        write_csv(tmp_path / "a.csv", TEXTS * 2, LABELS * 2)
        return train(*args, **options)

    monkeypatch.setattr(dataset, "train_tokenizer", train_while_the_file_grows)
    with pytest.raises(DataError, match="changed while they were read. Run it again"):
        dataset.prepare(job, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_copies_across_splits_are_removed_from_the_training_side(tmp_path):
    train = [*TEXTS, "In Test", "in both", "in both", "in validation"]
    job = make_job(
        train=write_csv(tmp_path / "train.csv", train, [*LABELS, "pos", "pos", "neg", "pos"]),
        validation=write_csv(
            tmp_path / "v.csv", ["in validation", "in  both", "own", "own2"], ["pos", "pos", "pos", "neg"]
        ),
        test=write_csv(tmp_path / "t.csv", ["in test", "in both", "mine", "mine"], ["pos", "pos", "neg", "neg"]),
    )
    report = dataset.prepare(job, tmp_path / "data")
    assert report["duplicates"] == {
        "removed": {"validation_in_test": 1, "train_in_test": 3, "train_in_validation": 1},
        "within": {"train": 0, "validation": 0, "test": 1},
        "train_texts_with_several_labels": 0,
    }
    assert {name: split["rows"] for name, split in report["splits"].items()} == {
        "train": 300,
        "validation": 3,
        "test": 4,
    }
    assert dataset.load_texts(tmp_path / "data", "validation") == ["in validation", "own", "own2"]
    assert dataset.Split.load(tmp_path / "data", "validation").rows.tolist() == [0, 2, 3]
    assert "3 train rows were removed because their text is in the test split" in report["warnings"]


def test_warnings_name_small_and_missing_classes_and_conflicts(tmp_path):
    kept = split_rows(from_rows(TEXTS), 0.1, 0.1)[0]["train"].texts
    job = make_job(train=write_csv(tmp_path / "a.csv", [*TEXTS, *kept[:3]], [*LABELS, "rare", "rare", "rare"]))
    report = dataset.prepare(job, tmp_path / "data")
    assert report["duplicates"]["train_texts_with_several_labels"] == 3
    assert report["duplicates"]["within"]["train"] == 3
    for warning in [
        "classes with fewer than 10 training rows: 'rare'",
        "classes without a validation row: 'rare'",
        "classes without a test row: 'rare'",
        "3 training texts occur under more than one label",
    ]:
        assert warning in report["warnings"]


def test_labels_that_have_an_index_keep_it(tmp_path):
    """Also one without rows: it keeps its column, and rows of it may be in the test file."""
    names = ["new" if i % 5 == 0 else label for i, label in enumerate(LABELS)]
    test = write_csv(tmp_path / "t.csv", ["one", "two"], ["pos", "gone"])
    job = make_job(train=write_csv(tmp_path / "a.csv", TEXTS, names), test=test)
    with pytest.raises(DataError, match="label 'gone' never occurs"):
        dataset.prepare(job, tmp_path / "data")
    first = ["pos", "gone", "neg"]
    report = dataset.prepare(job, tmp_path / "data", first)
    assert dataset.load_labels(tmp_path / "data") == [*first, "new"]
    counts = report["splits"]["train"]["labels"]
    assert list(counts) == [*first, "new"] and counts["gone"] == 0 < min(counts[n] for n in ("pos", "neg", "new"))
    assert [w for w in report["warnings"] if "gone" in w] == [
        f"classes without a {name} row: 'gone'" for name in ("train", "validation")
    ]
    assert dataset.Split.load(tmp_path / "data", "test").labels.tolist() == [0, 1]
    rows = dataset.Split.load(tmp_path / "data", "train")
    assert [[*first, "new"][i] for i in rows.labels] == [names[i] for i in rows.rows]

    # Equal data in another order is made again; in the same order, told by fewer or by all labels, it is not.
    made = (tmp_path / "data").stat().st_ino
    assert dataset.prepare(job, tmp_path / "data", [*first, "new"]) == report
    assert dataset.prepare(job, tmp_path / "data", first) == report
    assert (tmp_path / "data").stat().st_ino == made
    for other in (["gone"], ["neg", "gone", "pos"], [*first, "older"]):
        dataset.prepare(job, tmp_path / "data", other)
        assert dataset.load_labels(tmp_path / "data")[: len(other)] == other


def test_one_class_is_enough_where_the_others_have_an_index(tmp_path):
    job = make_job(train=write_csv(tmp_path / "a.csv", TEXTS, ["pos"] * 300))
    for first in ((), ["pos"]):
        with pytest.raises(DataError, match="fewer than two classes"):
            dataset.prepare(job, tmp_path / "data", first)
    report = dataset.prepare(job, tmp_path / "data", ["neg", "pos"])
    assert report["splits"]["train"]["labels"] == {"neg": 0, "pos": report["splits"]["train"]["rows"]}
    # Nor need there be a training row of it where other splits have some.
    in_test = split_rows(from_rows(TEXTS), 0.1, 0.1)[0]["test"].texts
    job = make_job(train=write_csv(tmp_path / "a.csv", TEXTS, ["neg" if t in in_test else "pos" for t in TEXTS]))
    report = dataset.prepare(job, tmp_path / "data", ["neg", "pos"])
    assert report["splits"]["train"]["labels"]["neg"] == 0 < report["splits"]["test"]["labels"]["neg"]


def test_a_tokenizer_of_the_users_own(tmp_path):
    model = train_tokenizer(make_texts(200, seed=9), 300)
    (tmp_path / "own.model").write_bytes(model)
    train = write_csv(tmp_path / "a.csv", TEXTS, LABELS)
    job = make_job(train=train, tokenizer={"model_file": f"{tmp_path}/own.model"})
    report = dataset.prepare(job, tmp_path / "data")
    assert (tmp_path / "data" / "tokenizer.model").read_bytes() == model
    assert report["vocab_size"] == 300
    with pytest.raises(JobError, match="cannot read the tokenizer .*absent.model"):
        dataset.prepare(make_job(train=train, tokenizer={"model_file": f"{tmp_path}/absent.model"}), tmp_path / "data")


@pytest.mark.parametrize("model_type", ["char", "word"])
def test_a_tokenizer_that_cannot_sample_is_refused(tmp_path, model_type):
    (tmp_path / "own.model").write_bytes(foreign_model(model_type=model_type))
    train = write_csv(tmp_path / "a.csv", TEXTS, LABELS)
    tokenizer = {"model_file": f"{tmp_path}/own.model"}
    dataset.data_fingerprint(make_job(train=train, tokenizer=tokenizer))
    with pytest.raises(JobError, match=r"own.model has one way to spell.*set training.subword_sampling to 0"):
        dataset.prepare(
            make_job(train=train, tokenizer=tokenizer, training={"subword_sampling": 0.5}), tmp_path / "data"
        )


@pytest.mark.parametrize("needing", [{"training": {"token_dropout": 0.1}}, {"pretraining": {"epochs": 1}}])
def test_a_mask_where_the_training_needs_one(tmp_path, needing):
    train = write_csv(tmp_path / "a.csv", TEXTS, LABELS)
    plain, masked = make_job(train=train), make_job(train=train, **needing)
    assert dataset.data_fingerprint(plain) != dataset.data_fingerprint(masked)
    assert dataset.prepare(masked, tmp_path / "data")["vocab_size"] == 320
    assert Tokenizer.load(tmp_path / "data" / "tokenizer.model").mask_id == 2
    assert not any(np.isin(2, dataset.Split.load(tmp_path / "data", s).tokens) for s in ("train", "validation", "test"))

    for name, options in (("with", {"control_symbols": ["<mask>"]}), ("without", {})):
        (tmp_path / name).write_bytes(foreign_model(**options, vocab_size=70))
    own = make_job(train=train, tokenizer={"model_file": f"{tmp_path}/with"}, **needing)
    dataset.prepare(own, tmp_path / "own")
    assert Tokenizer.load(tmp_path / "own" / "tokenizer.model").mask_id == 2
    message = (
        "without has no control symbol <mask>.*Train it with --control_symbols=<mask>, or set training.token_dropout "
        "and pretraining.epochs to 0. Received: token_dropout=0"
    )
    with pytest.raises(JobError, match=message):
        dataset.data_fingerprint(make_job(train=train, tokenizer={"model_file": f"{tmp_path}/without"}, **needing))


def test_unlabelled_texts_are_kept_once_and_apart_from_what_is_measured(tmp_path):
    splits = split_rows(from_rows(TEXTS), 0.1, 0.1)[0]
    own = make_texts(40, seed=5)
    copies = [splits["test"].texts[0].upper(), splits["validation"].texts[1], splits["train"].texts[2], own[3]]
    lines = ["body", *own, "  ", *copies, "one more text"]
    (tmp_path / "u.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "more.jsonl").write_text('{"body": "of another file"}\n', encoding="utf-8")
    train = tmp_path / "a.csv"
    write_csv(train, TEXTS, LABELS)
    train.write_text(train.read_text(encoding="utf-8").replace("text,label", "body,label"), encoding="utf-8")
    files = {"train": str(train), "unlabelled": [f"{tmp_path}/u.csv", f"{tmp_path}/more.jsonl"]}
    job = make_job(**files, text_column="body", pretraining={"epochs": 1})
    report = dataset.prepare(job, tmp_path / "data")
    kept = [*own, "one more text", "of another file"]
    assert report["unlabelled"]["rows"] == len(kept)
    assert report["unlabelled"]["removed"] == {"test": 1, "validation": 1, "train": 1, "unlabelled": 1}
    assert report["sources"]["unlabelled"] == {"files": files["unlabelled"], "rows": 47, "blank": 1}
    assert list(report["splits"]) == ["train", "validation", "test"]
    assert describe_rows(report).endswith(f"test {report['splits']['test']['rows']}, unlabelled 42 rows")

    tokenizer = Tokenizer.load(tmp_path / "data" / "tokenizer.model")
    assert tokenizer.model == train_tokenizer(splits["train"].texts, job.tokenizer.vocab_size, mask=True)
    split = dataset.Split.load(tmp_path / "data", dataset.UNLABELLED)
    for i, expected in enumerate(tokenizer.encode(kept, job.model.max_length)):
        np.testing.assert_array_equal(split.tokens[split.offsets[i] : split.offsets[i + 1]], expected)
    assert split.rows.tolist() == [*range(40), 45, 46] and set(split.labels.tolist()) == {-1}
    assert sorted(path.name for path in (tmp_path / "data" / "unlabelled").iterdir()) == [
        "labels.npy", "offsets.npy", "rows.npy", "tokens.npy",
    ]  # fmt: skip

    # They are part of what the data depends on, and named when they change.
    assert dataset.data_fingerprint(job, report) == dataset.data_fingerprint(job) == report["fingerprint"]
    assert dataset.changed_inputs(job, report) == []
    (tmp_path / "more.jsonl").write_text('{"body": "other"}\n{"body": "texts"}\n', encoding="utf-8")
    assert dataset.data_fingerprint(job) != report["fingerprint"]
    [change] = dataset.changed_inputs(job, report)
    assert re.fullmatch(r"data.unlabelled: .*more.jsonl: sha256 \w+ \(1 rows\) -> sha256 \w+ \(2 rows\)", change)


def test_unlabelled_texts_are_not_looked_at_without_pretraining(tmp_path):
    train = write_csv(tmp_path / "a.csv", TEXTS, LABELS)
    plain, job = make_job(train=train), make_job(train=train, unlabelled="nowhere.csv")
    assert dataset.data_fingerprint(job) == dataset.data_fingerprint(plain)
    report = dataset.prepare(job, tmp_path / "data")
    assert "unlabelled" not in report and not (tmp_path / "data" / "unlabelled").exists()
    assert dataset.changed_inputs(job, report) == []


def test_unlabelled_texts_that_are_all_elsewhere_are_refused(tmp_path):
    train = write_csv(tmp_path / "a.csv", TEXTS, LABELS)
    job = make_job(train=train, unlabelled=train, pretraining={"epochs": 1})
    with pytest.raises(DataError, match="data.unlabelled has no text of its own: each of its 300 rows is .*leave data"):
        dataset.prepare(job, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_vocabulary_the_data_does_not_allow_is_a_job_error(tmp_path):
    job = make_job(train=write_csv(tmp_path / "a.csv", TEXTS, LABELS), tokenizer={"vocab_size": 8000})
    with pytest.raises(JobError, match=r"Set tokenizer.vocab_size to at most \d+"):
        dataset.prepare(job, tmp_path / "data")
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]
    for size, reason in ((8000, "allows no more"), (260, "needs that many for its characters")):
        soft = make_job(train=job.data.train, tokenizer={"vocab_size": size, "hard_vocab_limit": False})
        report = dataset.prepare(soft, tmp_path / "data")
        assert Tokenizer.load(tmp_path / "data" / "tokenizer.model").vocab_size == report["vocab_size"] != size
        expected = f"{report['vocab_size']} pieces, not tokenizer.vocab_size={size}: this corpus {reason}"
        assert report["warnings"][0] == f"the vocabulary has {expected}"


def test_checks_name_what_is_wrong_and_what_to_do(tmp_path):
    def file(name, texts, labels):
        return write_csv(tmp_path / name, texts, labels)

    in_test = split_rows(from_rows(TEXTS), 0.1, 0.1)[0]["test"].texts
    kinds = [f"kind{i:02}" for i in range(12)]
    lost = ["lost" if text in in_test[:4] else name for text, name in zip(TEXTS, LABELS, strict=True)]
    train = file("train.csv", TEXTS, LABELS)
    for data, message in [
        (
            {"train": file("one.csv", TEXTS, ["neg"] * 300)},
            r"data.train has fewer than two classes.*data.label_column. Received: labels=\['neg'\]",
        ),
        (
            {"train": train, "test": file("new.csv", ["x", "y"], ["pos", "Neg"])},
            r"new.csv, row 2: label 'Neg' never occurs in data.train, which has 'neg', 'pos'. Correct the label",
        ),
        (
            {"train": file("many.csv", kinds, kinds), "test": file("z.csv", ["z"], ["z"])},
            r"which has 'kind00', .*, 'kind09' and 2 more\. ",
        ),
        (
            {"train": file("lost.csv", TEXTS, lost)},
            r"class 'lost' has no row left to train on: each of its 4 rows .*Give more rows of it, or remove the class",
        ),
        (
            {"train": file("few.csv", TEXTS[:2], ["a", "b"]), "validation_fraction": 1e-9},
            r"the validation split has no rows: of 2 rows in data.train none was chosen.*Give more rows",
        ),
        (
            {"train": train, "validation": train, "test": file("x.csv", ["x"], ["pos"])},
            r"the train split has no rows: of 300 rows in data.train .*copies of rows in another split",
        ),
    ]:
        with pytest.raises(DataError, match=message) as e:
            dataset.prepare(make_job(**data), tmp_path / "data")
        assert "\n" not in str(e.value)
    assert not (tmp_path / "data").exists()


def test_readers_say_so_when_nothing_was_prepared(tmp_path):
    for read in (dataset.load_labels, dataset.load_report):
        with pytest.raises(
            DataError, match=r"cannot read .*json: missing or damaged. Run `python -m pipeline prepare JOB.toml`"
        ):
            read(tmp_path)
    with pytest.raises(DataError, match="test.texts.jsonl: No such file"):
        dataset.load_texts(tmp_path, "test")
    with pytest.raises(DataError, match="cannot read .*train: No such file"):
        dataset.Split.load(tmp_path, "train")


@pytest.mark.parametrize(
    ("length", "padded"), [(0, 1), (1, 1), (31, 31), (32, 32), (33, 34), (63, 64), (65, 68), (129, 136), (1000, 1024)]
)
def test_padded_length_has_sixteen_steps_between_powers_of_two(length, padded):
    assert dataset.padded_length(length) == padded
