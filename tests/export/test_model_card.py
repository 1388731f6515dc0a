"""The model card: every figure is the manifest's or the data's, any label is shown as it is, its code runs."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from markdown_it import MarkdownIt

from export.model_card import MODEL_CARD, escape, render
from pipeline.contract import Manifest
from pipeline.dataset import load_report
from pipeline.summary import describe_baseline
from tests.jobs import environment, published_job

pytestmark = pytest.mark.slow

ODD_LABELS = [
    "a|b", "*bold*", "`code`", "<b>", "[x](y)", "# head", "two\nlines", "\\|",
    "很好 \U0001f600", "1. one", "&amp;",
]  # fmt: skip


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    return published_job(tmp_path_factory).model_dir / "1"


@pytest.fixture(scope="module")
def manifest(version):
    return Manifest.read(version)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return load_report(published_job(tmp_path_factory).run_dir / "data")


@pytest.fixture(scope="module")
def card(version):
    return (version / MODEL_CARD).read_text(encoding="utf-8")


def _tables(text):
    """Every table as a list of rows, each a list of cell texts as a reader of the rendered page sees them."""
    tables, row = [], None
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            row = []
            tables[-1].append(row)
        elif token.type == "inline" and row is not None and tables and token.level > 3:
            row.append("".join(child.content for child in token.children))
    return tables


def _with_labels(manifest, data, labels, support=20):
    """Manifest and data report of a model with other labels; the later a label, the better its figures."""
    figures = {
        label: {"precision": i / len(labels), "recall": 1.0, "f1": i / len(labels), "support": support}
        for i, label in enumerate(labels)
    }
    train = {**data["splits"]["train"], "labels": {label: 100 + i for i, label in enumerate(labels)}}
    return (
        dataclasses.replace(manifest, labels=labels, metrics={**manifest.metrics, "per_class": figures}),
        {**data, "splits": {**data["splits"], "train": train}},
    )


def test_the_card_is_that_of_this_version(card, manifest, data):
    parameters = int(re.search(r"Parameters ([\d,]+)", card)[1].replace(",", ""))
    assert card == render(manifest, data, parameters)
    assert parameters == 340 * 16 + 4 * (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16) + 3 * 2 * 16 + 16 * 2 + 2
    assert manifest.files[MODEL_CARD]["size"] == len(card.encode())


def test_figures(card, manifest, data):
    test, splits = manifest.metrics, data["splits"]
    assert card.startswith(f"# tiny\n\nGives a text one of 2 labels: {', '.join(manifest.labels)}.\n")
    for figure in (
        f"Accuracy {test['accuracy']:.4f}, macro-F1 {test['macro_f1']:.4f}, loss {test['loss']:.4f} nats",
        f"calibration error {test['calibration_error']:.4f}, {manifest.calibration['test']['before']:.4f} before",
        f"divided by {manifest.calibration['temperature']:.3f}, as fitted on validation",
        f"Results on the {test['rows']} test rows",
        "A Pre-Norm Transformer encoder",
        "layers 1, width 16, heads 2,\nfeed-forward width 32, mean pooling",
        "20% for validation and 20% for test set aside by a hash of the text",
        f"`{manifest.data_fingerprint}`",
        f"first {manifest.max_length} tokens",
        f"Baseline: {describe_baseline(manifest.baseline)}.",
        f"wrong ones (0.5: not at all): {test['confidence_auroc']:.3f}.",
    ):
        assert figure in card
    split_table, class_table, threshold_table, file_table = _tables(card)
    assert split_table[1:] == [
        [
            name, str(s["rows"]), str(s["length"]["p50"]), str(s["length"]["p95"]), f"{s['truncated_share']:.1%}",
            f"{s['unknown_share']:.2%}",
        ]
        for name, s in splits.items()
    ]  # fmt: skip
    expected = [
        [label, *(f"{f[k]:.3f}" for k in ("precision", "recall", "f1")), str(f["support"]), str(trained)]
        for (label, f), trained in zip(test["per_class"].items(), splits["train"]["labels"].values(), strict=True)
    ]
    assert class_table[1:] == sorted(expected, key=lambda row: float(row[3]))
    assert [row[0] for row in threshold_table[1:]] == ["0.00", "0.50", "0.60", "0.70", "0.80", "0.90", "0.95", "0.99"]
    assert threshold_table[1] == ["0.00", "100.0%", f"{test['accuracy']:.4f}"]
    named = {row[0]: row for row in file_table[1:]}
    assert set(named) == {f for f in manifest.files if f.startswith("onnx/")} | {"saved_model.pb", "tokenizer.model"}
    for file, row in named.items():
        assert row[1] == f"{manifest.files[file]['size'] / 1e6:.1f}"
    assert f"within {manifest.parity['saved_model']['max_abs_difference']:.1e} in" in named["saved_model.pb"][3]


def test_figures_that_are_not_there_or_not_defined(manifest, data):
    without = {k: v for k, v in manifest.metrics.items() if k not in ("thresholds", "confidence_auroc")}
    card = render(dataclasses.replace(manifest, metrics=without, baseline={}), data, 1)
    assert "Baseline" not in card and len(_tables(card)) == 3
    unsure = [{"threshold": 0.99, "coverage": 0.0, "accuracy": None}]
    metrics = {**manifest.metrics, "thresholds": unsure, "confidence_auroc": None}
    card = render(dataclasses.replace(manifest, metrics=metrics), data, 1)
    assert _tables(card)[2][1:] == [["0.99", "0.0%", ""]]
    assert "not defined, as all are right or all wrong." in card


def test_pretraining_is_told(card, manifest, data):
    assert "masked" not in card
    job = {**manifest.job, "pretraining": {**manifest.job["pretraining"], "epochs": 3}}
    pretrained = dataclasses.replace(manifest, job=job)
    assert "predict masked tokens of the training texts, for 3 epochs." in render(pretrained, data, 1)
    with_more = {**data, "unlabelled": {"rows": 4321}}
    assert "of the training texts and 4,321 unlabelled ones, for 3 epochs." in render(pretrained, with_more, 1)


def test_ngrams_are_told(card, manifest, data):
    assert "pairs of" not in card
    job = {**manifest.job, "model": {**manifest.job["model"], "ngram_pairs": 65_536}}
    beside = dataclasses.replace(manifest, job=job, calibration={**manifest.calibration, "ngram_weight": 2.5})
    told = render(beside, data, 1)
    assert "times 2.500: the scores of a linear model" in told and "65,536 of them at most, and over the" in told
    assert "Options:" not in told


def test_only_files_that_are_there_are_named(manifest, data):
    assert "int8" in render(manifest, data, 1)
    files = {f: v for f, v in manifest.files.items() if "int8" not in f}
    warning = "onnx/model.int8.onnx was left out: 1.0% of labels agree"
    card = render(dataclasses.replace(manifest, files=files, warnings=[warning]), data, 1)
    assert re.findall(r".*int8.*", card) == [f"- {escape(warning)}"]


def test_any_label_is_shown_as_it_is(manifest, data):
    card = render(*_with_labels(manifest, data, ODD_LABELS), 1)
    assert [row[0] for row in _tables(card)[1][1:]] == [label.replace("\n", "\\n") for label in ODD_LABELS]
    assert {len(row) for row in _tables(card)[1]} == {6}


@pytest.mark.parametrize("count", [50, 51, 300])
def test_of_many_classes_both_ends_are_shown(manifest, data, count):
    labels = [f"class {i:03}" for i in range(count)]
    card = render(*_with_labels(manifest, data, labels), 1)
    shown = [row[0] for row in _tables(card)[1][1:]]
    assert shown == (labels if count == 50 else labels[:10] + labels[-10:])
    assert ("`manifest.json`" in card.split("## Limits")[0]) is (count > 50)
    assert len(card) < 8000


def test_classes_with_few_test_rows_are_named(manifest, data):
    assert "say little" not in render(*_with_labels(manifest, data, ["a", "b"], support=10), 1)
    assert "say little: 2 classes (a, b)." in render(*_with_labels(manifest, data, ["a", "b"], support=9), 1)


def test_its_code_runs(card, version):
    snippets = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(snippets) == 2
    answers = []
    for snippet in snippets:
        command = [sys.executable, "-c", snippet]
        done = subprocess.run(command, cwd=version, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert [line.split()[0] for line in answers[0].splitlines()] == json.loads(answers[1].replace("'", '"'))


@pytest.mark.parametrize("text_signature", [True, False])
def test_its_request_is_json_for_the_signature(manifest, data, text_signature):
    job = {**manifest.job, "export": {**manifest.job["export"], "text_signature": text_signature}}
    card = render(dataclasses.replace(manifest, job=job), data, 1)
    [(url, body)] = re.findall(r"curl -s (\S+) \\\n  -d '(.*)'", card)
    assert url == "localhost:8501/v1/models/tiny:predict"
    assert list(json.loads(body)["inputs"]) == (["text"] if text_signature else ["token_ids"])


def test_options_are_named(manifest, data, card):
    assert "Options:" not in card
    model = {**manifest.job["model"], "position": "rope", "num_kv_heads": 1, "norm": "post"}
    card = render(dataclasses.replace(manifest, job={**manifest.job, "model": model}), data, 1)
    assert "A Post-Norm Transformer encoder" in card
    assert "Options: position rope, num_kv_heads 1.\n" in card
