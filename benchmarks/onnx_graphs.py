"""Speed and size of the exported ONNX files against one another in the same run, on a CPU.

    .venv/bin/python benchmarks/onnx_graphs.py
    .venv/bin/python benchmarks/onnx_graphs.py --before REVISION --also optimised=other.onnx --models reference

`--before` also converts the same weights with the code of an older git revision; `--also` adds any file with the same
inputs and outputs. Answers are compared before anything is timed. Contenders take turns, each with a session of its
own; figures are medians, shares are of the float32 file's time. Prints one JSON object. (Not named onnx.py: Python
would import it in the place of the package.)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8000
SMALL = {"d_model": 128, "num_heads": 4, "d_ff": 256, "num_layers": 1, "max_length": 64}
MODELS = {  # name -> (what differs from the reference model, batches as rows x tokens)
    "reference": ({}, [(1, 32), (1, 128), (16, 64), (8, 256)]),
    "small": (SMALL, [(1, 16), (1, 64), (32, 64)]),
}
# Largest difference of a probability; weights at random let int8 look worse than trained ones.
TOLERANCES = {"int8": 5e-2}
# Random weights whose biases aren't zero, as after training. It runs under the code of either revision.
CONVERT = """
import json, os, sys
os.environ["KERAS_BACKEND"] = "tensorflow"
import numpy as np
import onnx
from pipeline.runtime import start_tensorflow
start_tensorflow()
from export.onnx_graph import convert, make_metadata
from pipeline.classifier import build_classifier
from pipeline.config import ModelConfig
target, vocabulary, sizes = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = build_classifier(ModelConfig(**sizes), vocabulary, 2, seed=1)
rng = np.random.default_rng(0)
for weight in model.weights:
    if len(weight.shape) == 1:
        weight.assign(weight.numpy() + rng.normal(0, 0.1, weight.shape).astype(np.float32))
metadata = make_metadata("benchmark", 1, ["a", "b"], model._config["max_length"], "")
try:
    from pipeline.calibrated import CalibratedClassifier
except ImportError:  # a revision without
    pass
else:
    model = CalibratedClassifier(model)
onnx.save(convert(model, 20, metadata), target)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--before", metavar="REVISION", help="also convert with the code of this git revision")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=FILE", help="other files of the same model")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    versions = {"onnxruntime": ort.__version__, "onnx": onnx.__version__, "numpy": np.__version__}
    report = {"cpus": os.cpu_count(), "rounds": options.rounds, "versions": versions}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            report[name] = _model(name, options, Path(scratch))
    print(json.dumps(report, indent=2))


def _model(name, options, scratch):
    sizes, shapes = MODELS[name]
    files = _files(sizes, options.before, scratch)
    files |= {key: Path(path) for key, path in (other.split("=", 1) for other in options.also)}
    report = {key: {"bytes": p.stat().st_size, "nodes": len(onnx.load(p).graph.node)} for key, p in files.items()}
    report["times"] = []
    for threads in options.threads:
        sessions = {key: _session(path, threads) for key, path in files.items()}
        for shape in shapes:
            token_ids = _token_ids(*shape)
            _compare(sessions, token_ids)
            times = _time(sessions, token_ids, options.rounds)
            base = statistics.median(times["float32"])
            shares = {key: round(statistics.median(t) / base, 3) for key, t in times.items() if key != "float32"}
            figures = {"threads": threads, "batch": shape, "float32_ms": round(1e3 * base, 3), "shares": shares}
            report["times"].append(figures)
    others = [key for key in files if key != "float32"]
    report["median_share"] = {k: statistics.median(row["shares"][k] for row in report["times"]) for k in others}
    return report


def _files(sizes, before, scratch):
    files = {precision: scratch / f"{precision}.onnx" for precision in ("float32", "int8", "ort")}
    _convert(ROOT, files["float32"], sizes)
    sys.path.insert(0, str(ROOT))
    from export.ort import convert_ort
    from export.quantize import quantize_int8

    quantize_int8(files["float32"], files["int8"])
    convert_ort(files["float32"], files["ort"])
    if before:
        code = scratch / "before"
        code.mkdir(exist_ok=True)
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", before], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(code)], check=True, input=archive)
        files["before"] = scratch / "before.onnx"
        _convert(code, files["before"], sizes)
    return files


def _convert(code, target, sizes):
    command = [sys.executable, "-c", CONVERT, str(target), str(VOCABULARY), json.dumps(sizes)]
    environment = {**os.environ, "PYTHONPATH": str(code), "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run(command, cwd=code, env=environment, check=True, stdout=sys.stderr)


def _session(path, threads):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _token_ids(rows, length):
    """Rows of half the length to the whole, the first one full: int32 [rows, length], padded at the end."""
    rng = np.random.default_rng(rows * length)
    token_ids = rng.integers(1, VOCABULARY, (rows, length), np.int32)
    for row in token_ids[1:]:
        row[rng.integers(length // 2, length + 1) :] = 0
    return token_ids


def _compare(sessions, token_ids):
    token_ids = np.concatenate([token_ids, np.zeros_like(token_ids[:1])])  # and a text without tokens
    answers = {key: session.run(["probabilities"], {"token_ids": token_ids})[0] for key, session in sessions.items()}
    for key, answer in answers.items():
        difference = np.abs(answer - answers["float32"]).max()
        if not difference <= TOLERANCES.get(key, 1e-5):
            raise SystemExit(f"{key} answers differently: by {difference}")


def _time(sessions, token_ids, rounds):
    repeats = max(1, 4096 // token_ids.size)  # a short run is repeated within its turn
    times = {key: [] for key in sessions}
    for i in range(rounds + 1):
        for key, session in list(sessions.items())[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            for _ in range(repeats):
                session.run(["probabilities"], {"token_ids": token_ids})
            times[key].append((time.perf_counter() - start) / repeats)
    return {key: t[1:] for key, t in times.items()}  # without the warm-up


if __name__ == "__main__":
    main()
