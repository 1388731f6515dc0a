"""Accuracy of whole jobs on labelled sets, with several seeds, beside linear baselines.

    .venv/bin/python benchmarks/accuracy.py --data DIR --work runs/accuracy
    .venv/bin/python benchmarks/accuracy.py --data DIR --sets trec sst2 --set training.r_drop=0 --work runs/no-r-drop

DIR has a folder for each set, with train.csv, validation.csv and test.csv (columns text, label), and sometimes
test_nodup.csv: those test texts that are not in train. Each job goes the whole way to a published version; everything
is chosen on validation, and the test rows are looked at once. Figures are those of the published ONNX file. Run it
again with the same --work to go on where it ended; a run whose settings have changed is refused.

Prints one JSON object, and before it a table on stderr. Latencies are of one text of the set's median length on one
thread: the published file over one encoder without convolution and n-grams, and over the reference model, medians
of rounds in which they take turns.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from export.model_card import MODEL_CARD  # noqa: E402
from pipeline.contract import ONNX_FILES, Manifest, versions  # noqa: E402
from serving.onnx_classifier import OnnxClassifier  # noqa: E402

# Test accuracy of fastText 0.9.2 (lr 0.5, 25 epochs, wordNgrams 2) on the same splits, in %.
FASTTEXT = {
    "sst2": 80.5,
    "trec": 90.2,
    "banking77": 88.3,
    "chnsenticorp": 91.4,
    "thucnews_titles_small": 84.3,
    "sms_spam": 98.9,
}
PLAIN = {"encoders": 1, "convolution": 0, "ngram_pairs": 0}
CONVERT = """
import json, sys
from pipeline.runtime import start_tensorflow
start_tensorflow()
import onnx
from export.onnx_graph import convert, make_metadata
from pipeline.calibrated import build_calibrated
from pipeline.config import ModelConfig
target, vocabulary, classes, sizes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
model = build_calibrated(ModelConfig(**sizes), vocabulary, classes, seed=1)
for weight in [*model.trainable_weights, model.temperature]:  # 0 and 1, as biases begin, are left out of graphs
    weight.assign(weight + 0.1)
labels = [str(i) for i in range(classes)]
onnx.save(convert(model, 20, make_metadata("benchmark", 1, labels, sizes["max_length"], "")), target)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where the runs are and stay")
    parser.add_argument("--sets", nargs="*", default=[], help="folders of --data; all without it")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--recipe", default="small-data")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="as of the pipeline, for every job")
    parser.add_argument("--rounds", type=int, default=200, help="of the latency")
    options = parser.parse_args()
    sets = options.sets or sorted(p.name for p in options.data.iterdir() if (p / "train.csv").exists())
    report = {"cpus": os.cpu_count(), "recipe": options.recipe, "set": options.set, "seeds": options.seeds, "sets": {}}
    for name in sets:
        runs = [_run(name, seed, options) for seed in options.seeds]
        report["sets"][name] = {**_summary(name, runs), "latency": _latency(runs[0], options.rounds), "runs": runs}
        print(_line(name, report["sets"][name]), file=sys.stderr, flush=True)
    print("\n".join(_table(report["sets"])), file=sys.stderr)
    print(json.dumps(report, indent=2))


def _run(name, seed, options):
    """Runs one job, or what is left of it, and returns its figures."""
    directory = options.data / name
    job = {
        "name": f"{name.replace('_', '-')}-{seed}",
        "seed": seed,
        "work_dir": str(options.work / "runs"),
        "training.recipe": options.recipe,
        "publish.base_path": str(options.work / "models"),
        **{f"data.{split}": str(directory / f"{split}.csv") for split in ("train", "validation", "test")},
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in job.items()] + options.set
    options.work.mkdir(parents=True, exist_ok=True)
    timing = options.work / "runs" / job["name"] / "training_s.json"
    empty = options.work / "empty.toml"
    empty.write_text("")
    run_dir, model_dir = options.work / "runs" / job["name"], options.work / "models" / job["name"]
    _pipeline("prepare", empty, settings)
    started = time.perf_counter()
    _pipeline("train", empty, settings)
    if not timing.exists():  # else it was trained before
        timing.write_text(json.dumps(time.perf_counter() - started))
    _pipeline("run", empty, settings)
    version_dir = max(versions(model_dir).items())[1]
    manifest = Manifest.read(version_dir)
    evaluation = json.loads((run_dir / "evaluation" / "report.json").read_text())
    data = json.loads((run_dir / "data" / "report.json").read_text())
    test, baseline, validation = manifest.metrics, evaluation["baseline"], evaluation["validation"]
    figures = {
        "seed": seed,
        "accuracy": test["accuracy"],
        "macro_f1": test["macro_f1"],
        "validation_accuracy": validation["accuracy"],
        "calibration_error": evaluation["calibration"]["test"],
        "confidence_auroc": test["confidence_auroc"],
        "baseline": {key: baseline[key] for key in ("features", "accuracy", "macro_f1", "mcnemar")},
        "parts": evaluation.get("parts"),
        "parameters": _parameters(version_dir),
        "training_minutes": json.loads(timing.read_text()) / 60,
        "bytes": manifest.files[ONNX_FILES["float32"]]["size"],
        "int8_bytes": manifest.files.get(ONNX_FILES["int8"], {}).get("size"),
        "vocab_size": data["vocab_size"],
        "median_tokens": data["splits"]["test"]["length"]["p50"],
        "version_dir": str(version_dir),
    }
    nodup = directory / "test_nodup.csv"
    if nodup.exists():
        figures["nodup_accuracy"] = _accuracy(version_dir, nodup)
    return figures


def _pipeline(command, job, settings):
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", command, str(job), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{command} of {settings[0]} failed: {done.stderr[-2000:]}")


def _parameters(version_dir):
    """Returns the number that the model card tells, n-grams included."""
    found = re.search(r"^Parameters ([\d,]+);", (version_dir / MODEL_CARD).read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1].replace(",", ""))


def _accuracy(version_dir, path):
    with open(path, encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    predictions = OnnxClassifier.load(version_dir).predict([row["text"] for row in rows])
    return float(np.mean([p.label == row["label"].strip() for p, row in zip(predictions, rows, strict=True)]))


def _summary(name, runs):
    def mean(key):
        return statistics.fmean(run[key] for run in runs)

    summary = {
        "accuracy": mean("accuracy"),
        "accuracy_sd": statistics.stdev(run["accuracy"] for run in runs) if len(runs) > 1 else 0.0,
        "macro_f1": mean("macro_f1"),
        "validation_accuracy": mean("validation_accuracy"),
        "training_minutes": max(run["training_minutes"] for run in runs),
        "parameters": runs[0]["parameters"],
        "bytes": runs[0]["bytes"],
        "baseline": runs[0]["baseline"]["accuracy"],
        "fasttext": FASTTEXT.get(name, 0.0) / 100 or None,
        "calibration_error_after": max(run["calibration_error"]["after"] for run in runs),
    }
    if "nodup_accuracy" in runs[0]:
        summary["nodup_accuracy"] = mean("nodup_accuracy")
    return summary


def _latency(run, rounds):
    """Returns the medians in ms and their ratios."""
    version_dir = Path(run["version_dir"])
    manifest = Manifest.read(version_dir)
    model = manifest.job["model"]
    reference = {"max_length": model["max_length"]}
    vocabulary = run["vocab_size"]
    with tempfile.TemporaryDirectory() as scratch:
        files = {"ours": version_dir / ONNX_FILES["float32"]}
        for key, sizes in (("plain", {**model, **PLAIN}), ("reference", reference)):
            files[key] = Path(scratch) / f"{key}.onnx"
            command = [sys.executable, "-c", CONVERT, str(files[key]), str(vocabulary), str(len(manifest.labels))]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
            subprocess.run([*command, json.dumps(sizes)], env=environment, check=True, stdout=subprocess.DEVNULL)
        rng = np.random.default_rng(0)
        # At random: all texts look up rows that lie apart, as real ones do.
        token_ids = rng.integers(3, vocabulary, (rounds, 1, max(1, run["median_tokens"]))).astype(np.int32)
        times = {key: [] for key in files}
        sessions = {key: _session(path) for key, path in files.items()}
        for row in token_ids:
            for key, session in sessions.items():
                session.run(["probabilities"], {"token_ids": row})  # else it pays for the caches that others filled
                started = time.perf_counter()
                session.run(["probabilities"], {"token_ids": row})
                times[key].append(time.perf_counter() - started)
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        **{f"{key}_ms": 1e3 * value for key, value in medians.items()},
        "over_plain": medians["ours"] / medians["plain"],
        "over_reference": medians["ours"] / medians["reference"],
    }


def _session(path):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _table(sets):
    head = (
        "| set | accuracy | macro-F1 | TF-IDF + SVC | fastText | ECE | minutes | parameters | MB | latency |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    )
    return [*head, *(_line(name, figures) for name, figures in sets.items())]


def _line(name, figures):
    nodup = f" ({100 * figures['nodup_accuracy']:.1f})" if "nodup_accuracy" in figures else ""
    fasttext = f"{100 * figures['fasttext']:.1f}" if figures["fasttext"] else ""
    return (
        f"| {name} | {100 * figures['accuracy']:.2f} ± {100 * figures['accuracy_sd']:.2f}{nodup} "
        f"| {100 * figures['macro_f1']:.1f} | {100 * figures['baseline']:.1f} | {fasttext} "
        f"| {figures['calibration_error_after']:.3f} | {figures['training_minutes']:.1f} "
        f"| {figures['parameters']:,} | {figures['bytes'] / 1e6:.1f} "
        f"| {figures['latency']['over_plain']:.2f} / {figures['latency']['over_reference']:.2f} |"
    )


if __name__ == "__main__":
    main()
