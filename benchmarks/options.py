"""What each option of `[model]` costs: parameters, a training step and one answer, as shares of the reference model's.

    .venv/bin/python benchmarks/options.py
    .venv/bin/python benchmarks/options.py --options rope swiglu --length 512

Each option is measured beside the reference model in the same run, in turns; figures are medians. A step is a batch of
4,096 tokens; an answer is one text in the ONNX file, on one thread. Answers of the ONNX file are compared with the
model's before anything is timed. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

VOCABULARY, CLASSES, BATCH_TOKENS = 8000, 2, 4096
OPTIONS = {  # name -> (keys of [model], keys of [training])
    "learned": ({"position": "learned"}, {}),
    "rope": ({"position": "rope"}, {}),
    "alibi": ({"position": "alibi"}, {}),
    "none": ({"position": "none"}, {}),
    "max": ({"pooling": "max"}, {}),
    "cls": ({"pooling": "cls"}, {}),
    "post": ({"norm": "post"}, {}),
    "relu": ({"activation": "relu"}, {}),
    "swiglu": ({"activation": "swiglu"}, {}),
    "num_kv_heads=2": ({"num_kv_heads": 2}, {}),
    "num_kv_heads=1": ({"num_kv_heads": 1}, {}),
    "local": ({"attention": "local"}, {}),
    "local_global": ({"attention": "local_global"}, {}),
    "linear": ({"attention": "linear"}, {}),
    "num_experts=4": ({"num_experts": 4}, {}),
    "convolution=3": ({"convolution": 3}, {}),
    "encoders=3": ({"encoders": 3}, {}),
    "ngram_pairs=131072": ({"ngram_pairs": 131072}, {}),
    "recompute": ({}, {"recompute": True}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--options", nargs="*", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    from pipeline.runtime import start_tensorflow

    start_tensorflow()
    import keras
    import onnxruntime as ort
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as scratch:
        reference = Contender({}, {}, arguments.length, Path(scratch) / "reference.onnx")
        report = {
            "length": arguments.length,
            "rounds": arguments.rounds,
            "reference": {"parameters": reference.parameters},
            "threads": tf.config.threading.get_intra_op_parallelism_threads(),
            "versions": {"tensorflow": tf.__version__, "keras": keras.__version__, "onnxruntime": ort.__version__},
        }
        for name in arguments.options:
            option = Contender(*OPTIONS[name], arguments.length, Path(scratch) / "option.onnx")
            report[name] = {"parameters": round(option.parameters / reference.parameters, 3)}
            for what in ("step", "answer"):
                calls = getattr(reference, what), getattr(option, what)
                repeats = 10 if what == "answer" else 1  # a short run is repeated within its turn
                times = [[_time(call, repeats) for call in calls] for _ in range(arguments.rounds)]
                before, after = (statistics.median(t) for t in zip(*times[1:], strict=True))
                report[name][what] = round(after / before, 3)
                report["reference"][f"{what}_ms"] = round(1e3 * before, 2)
            print(name, report[name], file=sys.stderr, flush=True)
    print(json.dumps(report, indent=2))


def _time(call, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


class Contender:
    """A model with random weights, its training step and its ONNX file."""

    def __init__(self, sizes, training, length, path):
        import onnx
        import onnxruntime as ort

        from export.onnx_graph import convert, make_metadata
        from pipeline.calibrated import build_calibrated
        from pipeline.config import ModelConfig, TrainingConfig
        from pipeline.train_step import TrainStep

        config, training = ModelConfig(**sizes, max_length=length), TrainingConfig(**training)
        calibrated = build_calibrated(config, VOCABULARY, CLASSES, seed=1, recompute=training.recompute)
        model, fitted = calibrated.encoder, []
        if calibrated.ngrams is not None:
            calibrated.ngram_weight.assign(1.0)  # at 0, as before anything is fitted, they could be left out
            fitted = calibrated.ngrams.weights
        rng = np.random.default_rng(0)
        self._batch = (
            rng.integers(2, VOCABULARY, (BATCH_TOKENS // length, length)).astype(np.int32),
            rng.integers(0, CLASSES, BATCH_TOKENS // length).astype(np.int32),
        )
        metadata = make_metadata("benchmark", 1, ["a", "b"], length, "")
        onnx.save(convert(calibrated, 20, metadata), path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._text = self._batch[0][:1]
        found = self._session.run(["logits"], {"token_ids": self._text})[0]
        np.testing.assert_allclose(found, calibrated(self._text), atol=1e-4, rtol=1e-4)
        self.parameters = sum(w.shape.num_elements() for w in [*model.trainable_weights, *fitted])
        self._step = TrainStep(model, training, np.ones(CLASSES))

    def step(self):
        self._step([self._batch], 3e-4)

    def answer(self):
        self._session.run(["probabilities"], {"token_ids": self._text})


if __name__ == "__main__":
    main()
