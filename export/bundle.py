"""One candidate version directory: every artifact, verified in fresh processes, described by its manifest."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import subprocess
import tempfile
from pathlib import Path

import onnx

from export import onnx_text, saved_model, verify
from export.float16 import convert_float16
from export.fusion import check_counts, count_operators
from export.model_card import write_model_card
from export.onnx_graph import convert, make_metadata
from export.ort import convert_ort
from export.quantize import quantize_int8
from export.verify import MAX_ACCURACY_DROP, MIN_AGREEMENT
from pipeline import dataset
from pipeline.contract import ONNX_FILES, ONNX_TEXT, PAD_ID, STAGED, TOKENIZER_MODEL, Manifest, list_files
from pipeline.files import staged_directory
from pipeline.text import Tokenizer
from serving.warmup import warmup_batches, write_warmup

# onnxruntime and onnxruntime-gpu are the same module; one of them is installed.
_PACKAGES = (
    "tensorflow",
    "keras",
    "tensorflow-text",
    "tf2onnx",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-extensions",
    "sentencepiece",
    "numpy",
)


def build_candidate(job, run_dir, model, version, export_key, report, note):
    """Exports, verifies and describes; `run_dir/candidate/` is complete or does not exist.

    Args:
        job: a `JobConfig`.
        run_dir: the run directory, with `data/`.
        model: the trained and fitted `CalibratedClassifier` in float32.
        version: number under which the candidate will be published.
        export_key: fingerprint of everything it is made from.
        report: the evaluation report.
        note: called with one line per step.

    Returns:
        The candidate's `Manifest`.

    Raises:
        VerificationError: an artifact does not answer as the model does; nothing is left behind.
    """
    data_dir = Path(run_dir) / "data"
    labels = dataset.load_labels(data_dir)
    tokenizer = Tokenizer.load(data_dir / TOKENIZER_MODEL)
    texts = dataset.load_texts(data_dir, "test")
    # In the run directory, where the next run removes what a killed one has left.
    scratch = tempfile.TemporaryDirectory(dir=run_dir, prefix=f"{STAGED}verification-")
    with staged_directory(Path(run_dir) / "candidate") as directory, scratch as cases_dir:
        note("exporting SavedModel and ONNX graphs")
        _write_artifacts(job, directory, model, version, labels, tokenizer, texts)
        graphs = _count_graphs(directory, job.model)
        manifest = Manifest(
            name=job.name,
            version=version,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            labels=labels,
            max_length=job.model.max_length,
            pad_id=PAD_ID,
            files=list_files(directory),
            metrics=report["test"],
            parity={},
            warnings=[],
            job=job.portable(),
            data_fingerprint=report["data_fingerprint"],
            export_key=export_key,
            packages=package_versions(),
            source_revision=source_revision(),
            label_counts=dataset.load_report(data_dir)["splits"]["train"]["labels"],
            graphs=graphs,
            calibration=report["calibration"],
            baseline=report.get("baseline", {}),
        )
        manifest.write(directory)
        note("reloading every artifact in fresh processes and comparing it with the trained model")
        cases = Path(cases_dir) / "cases.npz"
        predict = saved_model.classify_function(model)
        verify.write_cases(
            cases,
            lambda token_ids: predict(token_ids)["logits"],
            texts,
            tokenizer,
            job.model.max_length,
            dataset.Split.load(data_dir, "test"),
            report["calibration"]["temperature"],
        )
        parity = verify.verify(directory, cases)
        manifest = _without_poor(dataclasses.replace(manifest, parity=parity), directory)
        weights = [*model.trainable_weights, *(model.ngrams.weights if model.ngrams is not None else [])]
        parameters = sum(weight.shape.num_elements() for weight in weights)
        write_model_card(directory, manifest, dataset.load_report(data_dir), parameters)  # names the files that stayed
        manifest = dataclasses.replace(manifest, files=list_files(directory))
        manifest.write(directory)
    return manifest


def _write_artifacts(job, directory, model, version, labels, tokenizer, texts):
    export, max_length = job.export, job.model.max_length
    saved_model.export_saved_model(
        model, directory, labels, tokenizer.model if export.text_signature else None, max_length
    )
    (directory / TOKENIZER_MODEL).write_bytes(tokenizer.model)
    batches, token_ids = warmup_batches(texts, tokenizer, max_length)
    write_warmup(directory, job.name, batches, token_ids, export.text_signature)
    metadata = make_metadata(job.name, version, labels, max_length, tokenizer.sha256)
    graph = convert(model, export.opset, metadata)
    (directory / "assets").mkdir(exist_ok=True)  # TensorFlow leaves it out when it is empty
    for file in (*ONNX_FILES.values(), ONNX_TEXT):
        (directory / file).parent.mkdir(exist_ok=True)
    onnx.save(graph, directory / ONNX_FILES["float32"])
    onnx.save(onnx_text.build_text_graph(graph, tokenizer.model, max_length), directory / ONNX_TEXT)
    for precision, write in (("int8", quantize_int8), ("float16", convert_float16), ("ort", convert_ort)):
        if precision in export.precisions:
            write(directory / ONNX_FILES["float32"], directory / ONNX_FILES[precision])


def _count_graphs(directory, model):
    """Returns what was counted in each ONNX file, after comparing it with what it must be."""
    graphs = {}
    for precision, file in [*ONNX_FILES.items(), ("float32", ONNX_TEXT)]:
        if (directory / file).exists():
            graphs[file] = count_operators(onnx.load(directory / file))
            check_counts(precision, graphs[file], model)
    return graphs


def _without_poor(manifest, directory):
    """Leaves out the smaller files that answer too differently, with a warning."""
    for file in (ONNX_FILES["int8"], ONNX_FILES["float16"]):
        problem = _why_poor(manifest.parity[file]) if file in manifest.parity else ""
        if problem:
            (directory / file).unlink()
            graphs = {name: counts for name, counts in manifest.graphs.items() if name != file}
            warnings = [*manifest.warnings, f"{file} was left out: {problem}"]
            manifest = dataclasses.replace(manifest, files=list_files(directory), graphs=graphs, warnings=warnings)
    return manifest


def _why_poor(figures):
    if "poor" in figures:
        return figures["poor"]
    drop = round(figures["float32_accuracy"] - figures["accuracy"], 9)  # 0.78 - 0.775 is more than 0.005
    if figures["label_agreement"] >= MIN_AGREEMENT and drop <= MAX_ACCURACY_DROP:
        return ""
    return (
        f"on the test split {figures['label_agreement']:.2%} of its labels agree with float32, {MIN_AGREEMENT:.0%} are "
        f"needed, and its accuracy is {figures['accuracy']:.4f} against {figures['float32_accuracy']:.4f}, a drop of "
        f"{MAX_ACCURACY_DROP} is allowed"
    )


def package_versions():
    """Returns package -> version of those that shape the artifacts and are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def source_revision():
    """Returns the git revision of this code, or $SOURCE_REVISION in an image without git, or ""."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        found = done.stdout.strip() if done.returncode == 0 else ""
    except OSError:
        found = ""
    return found or os.environ.get("SOURCE_REVISION", "")
