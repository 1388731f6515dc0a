"""The model card: README.md of a version directory, for people; every figure in it is the manifest's or the data's."""

import json
import re
from pathlib import Path

from pipeline.config import ModelConfig
from pipeline.contract import ONNX_DIR, ONNX_FILES, ONNX_TEXT, SAVED_MODEL, TOKENIZER_MODEL
from pipeline.summary import describe_baseline, describe_parity

MODEL_CARD = "README.md"

_MOST_CLASSES = 50  # with more, the table shows those at both ends
_AT_EACH_END = 10
_FEW_ROWS = 10  # figures of a class with fewer test rows say little

_PURPOSE = {
    SAVED_MODEL: "TensorFlow Serving, with `variables/` and `assets.extra/`",
    ONNX_FILES["float32"]: "token ids in; standard operators only",
    ONNX_FILES["int8"]: "the same in 8 bits, for CPUs",
    ONNX_FILES["float16"]: "the same in 16 bits, for GPUs",
    ONNX_FILES["ort"]: "the same with ONNX Runtime's own attention operator",
    ONNX_TEXT: "text in; needs ONNX Runtime Extensions",
    TOKENIZER_MODEL: "SentencePiece",
}


def write_model_card(directory, manifest, data_report, parameters):
    """Writes `README.md` into a version directory.

    Args:
        directory: the version directory.
        manifest: its `Manifest`, with the files that stay and their parity.
        data_report: `data/report.json`.
        parameters: number of trained numbers in the model, those of the n-grams included.
    """
    (Path(directory) / MODEL_CARD).write_text(render(manifest, data_report, parameters), encoding="utf-8")


def render(manifest, data_report, parameters):
    """Returns the card as Markdown; arguments as in `write_model_card`. Equal arguments give equal text."""
    sections = [
        _head(manifest, data_report, parameters),
        _data(manifest, data_report),
        _results(manifest, data_report),
        _limits(manifest, data_report),
        _usage(manifest),
        _files(manifest),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


# Keys of [model] that have their own words, or concern training only.
_TOLD_OTHERWISE = {"d_model", "num_heads", "d_ff", "num_layers", "pooling", "norm", "max_length"}
_TOLD_OTHERWISE |= {"dropout", "head_dropout", "ngram_pairs"}


def escape(text):
    """Returns `text` such that Markdown shows it as it is, in one line; line breaks and the like as `\\n`."""
    spelled = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", spelled) or "(empty)"


def _head(manifest, data, parameters):
    model = manifest.job["model"]
    labels = ", ".join(escape(label) for label in manifest.labels[:_MOST_CLASSES])
    more = f" and {len(manifest.labels) - _MOST_CLASSES} more" if len(manifest.labels) > _MOST_CLASSES else ""
    return [
        f"# {manifest.name}",  # without its number, which a rollback changes
        "",
        f"Gives a text one of {len(manifest.labels)} labels: {labels}{more}.",
        "",
        f"A {model['norm'].capitalize()}-Norm Transformer encoder trained from scratch:",
        f"layers {model['num_layers']}, width {model['d_model']}, heads {model['num_heads']},",
        f"feed-forward width {model['d_ff']}, {model['pooling']} pooling.",
        *_options(model),
        *_ngrams(manifest),
        *_pretraining(manifest, data),
        f"Parameters {parameters:,}; SentencePiece vocabulary {data['vocab_size']:,}.",
        "",
        "Languages, intended use and licence are not stated: the pipeline does not know them.",
    ]


def _options(model):
    """One line with the options that are not the default's."""
    defaults = ModelConfig().model_dump(exclude=_TOLD_OTHERWISE)
    options = [f"{name} {model[name]}" for name, value in defaults.items() if model[name] != value]
    return [f"Options: {', '.join(options)}."] if options else []


def _ngrams(manifest):
    pairs = manifest.job["model"]["ngram_pairs"]
    if not pairs:
        return []
    weight = manifest.calibration["ngram_weight"]
    return [
        f"Added to its logits, times {weight:.3f}: the scores of a linear model over tokens, over pairs of",
        f"neighbours, {pairs:,} of them at most, and over the characters in both.",
    ]


def _pretraining(manifest, data):
    epochs = manifest.job["pretraining"]["epochs"]
    if not epochs:
        return []
    unlabelled = f" and {data['unlabelled']['rows']:,} unlabelled ones" if "unlabelled" in data else ""
    times = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    return [f"It first learned to predict masked tokens of the training texts{unlabelled}, for {times}."]


def _data(manifest, data):
    settings, splits, duplicates = manifest.job["data"], data["splits"], data["duplicates"]
    lines = [
        "## Data",
        "",
        "| split | rows | median tokens | 95 % have up to | cut | unknown tokens |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, split in splits.items():
        length = split["length"]
        lines.append(
            f"| {name} | {split['rows']:,} | {length['p50']} | {length['p95']} | {split['truncated_share']:.1%} "
            f"| {split['unknown_share']:.2%} |"
        )
    carved = [f"{settings[f'{name}_fraction']:.0%} for {name}" for name in splits if settings.get(name) == ""]
    own = [name for name in splits if name != "train" and settings.get(name) != ""]
    how = [f"{' and '.join(carved)} set aside by a hash of the text"] if carved else []
    how += [f"{' and '.join(own)} given by the data's owner"] if own else []
    removed, several = sum(duplicates["removed"].values()), duplicates["train_texts_with_several_labels"]
    return [
        *lines,
        "",
        f"Split: {', '.join(how)}. Copies of a text in two splits: {removed:,} removed.",
        f"Copies within train: {duplicates['within']['train']:,}; training texts with several labels: {several:,}.",
        "",
        f"Fingerprint: `{manifest.data_fingerprint}`.",
    ]


def _results(manifest, data):
    test, calibration = manifest.metrics, manifest.calibration
    per_class, trained = test["per_class"], data["splits"]["train"]["labels"]
    order = sorted(per_class, key=lambda label: (per_class[label]["support"] == 0, per_class[label]["f1"], label))
    shown, note = order, "the weakest first"
    if len(order) > _MOST_CLASSES:
        tested = [label for label in order if per_class[label]["support"]]
        shown = list(dict.fromkeys(tested[:_AT_EACH_END] + tested[-_AT_EACH_END:]))
        note = f"the weakest and the best {_AT_EACH_END} of {len(order)}; the others are in `manifest.json`"
    return [
        f"## Results on the {test['rows']:,} test rows",
        "",
        f"Accuracy {test['accuracy']:.4f}, macro-F1 {test['macro_f1']:.4f}, loss {test['loss']:.4f} nats,",
        f"calibration error {test['calibration_error']:.4f}, {calibration['test']['before']:.4f} before the logits",
        f"were divided by {calibration['temperature']:.3f}, as fitted on validation.",
        *_baseline(manifest.baseline),
        "",
        f"By class, {note}:",
        "",
        "| label | precision | recall | F1 | test rows | training rows |",
        "|---|--:|--:|--:|--:|--:|",
        *(_class_row(label, per_class[label], trained[label]) for label in shown),
        *_thresholds(test),
    ]


def _baseline(baseline):
    return ["", f"Baseline: {describe_baseline(baseline)}."] if baseline else []


def _thresholds(test):
    """What leaving unsure answers out would cost and gain; nothing for figures measured before there was this table."""
    if "thresholds" not in test:
        return []
    auroc = test["confidence_auroc"]
    how_well = "not defined, as all are right or all wrong" if auroc is None else f"{auroc:.3f}"
    return [
        "",
        "If only labels whose probability is at least a threshold are taken for an answer:",
        "",
        "| threshold | answered | accuracy of these |",
        "|--:|--:|--:|",
        *map(_threshold_row, test["thresholds"]),
        "",
        f"AUROC of the probability for telling right answers from wrong ones (0.5: not at all): {how_well}. Choose a",
        "threshold on other rows than these: `evaluation/report.json` of the run has the table of the validation rows.",
    ]


def _threshold_row(row):
    accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.4f}"
    return f"| {row['threshold']:.2f} | {row['coverage']:.1%} | {accuracy} |"


def _class_row(label, figures, training_rows):
    precision, recall, f1 = (f"{figures[name]:.3f}" for name in ("precision", "recall", "f1"))
    return f"| {escape(label)} | {precision} | {recall} | {f1} | {figures['support']:,} | {training_rows:,} |"


def _limits(manifest, data):
    cut = data["splits"]["test"]["truncated_share"]
    few = [label for label, figures in manifest.metrics["per_class"].items() if figures["support"] < _FEW_ROWS]
    lines = [
        "## Limits",
        "",
        "- Every text gets one of the labels above, also one that fits none of them. Look at the probability:",
        "  the table of thresholds shows what that gains. It does not find all that are out of place.",
        f"- Only the first {manifest.max_length} tokens of a text count; {cut:.1%} of the test texts were cut.",
        "- What the tokenizer never saw in training it spells in bytes or as an unknown token: expect less there.",
    ]
    if few:
        named = ", ".join(map(escape, few[:_AT_EACH_END])) + (", ..." if len(few) > _AT_EACH_END else "")
        lines.append(f"- With fewer than {_FEW_ROWS} test rows the figures say little: {len(few)} classes ({named}).")
    if ONNX_FILES["int8"] in manifest.files:
        lines.append(
            f"- `{ONNX_FILES['int8']}` quantizes over a whole batch: an answer moves slightly with its batch mates."
        )
    lines.append(
        f"- A NUL character counts as a blank, but some interfaces of ONNX Runtime end a string there before "
        f"`{ONNX_TEXT}` sees it: replace it first."
    )
    lines.append("- An id outside the vocabulary is an error; in ONNX Runtime on a GPU that text's answer is NaN.")
    return lines + [f"- {escape(warning)}" for warning in (*data["warnings"], *manifest.warnings)]


def _usage(manifest):
    inputs = {"text": ["a text"]} if manifest.job["export"]["text_signature"] else {"token_ids": [[5, 6, 7]]}
    return [
        "## How to call it",
        "",
        "TensorFlow Serving:",
        "",
        "```sh",
        f"curl -s localhost:8501/v1/models/{manifest.name}:predict \\",
        f"  -d '{json.dumps({'inputs': inputs})}'",
        "```",
        "",
        "Python, from this directory, without TensorFlow, where the pipeline's package is installed (`pip install",
        "'.[serving]'` in its repository):",
        "",
        "```python",
        "from serving.onnx_classifier import OnnxClassifier",
        "",
        'classifier = OnnxClassifier.load(".")',
        'for prediction in classifier.predict(["a text", "another"]):',
        "    print(prediction.label, prediction.probabilities)",
        "```",
        "",
        f"Other languages: `{ONNX_TEXT}` with ONNX Runtime Extensions, in Python:",
        "",
        "```python",
        "import json",
        "import numpy as np",
        "import onnxruntime",
        "import onnxruntime_extensions",
        "",
        "options = onnxruntime.SessionOptions()",
        "options.register_custom_ops_library(onnxruntime_extensions.get_library_path())",
        f'session = onnxruntime.InferenceSession("{ONNX_TEXT}", options)',
        'labels = json.loads(session.get_modelmeta().custom_metadata_map["labels"])',
        '(probabilities,) = session.run(["probabilities"], {"text": np.array(["a text", "another"], dtype=object)})',
        "print([labels[i] for i in probabilities.argmax(axis=1)])",
        "```",
    ]


def _files(manifest):
    lines = ["## Files", "", "| file | MB | for | compared with the trained model |", "|---|--:|---|---|"]
    for file in (f for f in manifest.files if f in _PURPOSE or f.startswith(f"{ONNX_DIR}/")):
        parity = manifest.parity.get("saved_model" if file == SAVED_MODEL else file)
        size, compared = manifest.files[file]["size"] / 1e6, describe_parity(parity) if parity else ""
        lines.append(f"| `{file}` | {size:.1f} | {_PURPOSE.get(file, '')} | {compared} |")
    rest = "`manifest.json`: the version's number, all figures and settings, package versions, SHA-256 of every file."
    return [*lines, "", rest]
