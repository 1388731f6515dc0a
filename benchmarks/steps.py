"""One contender of benchmarks/training.py: takes a question on each line of stdin and answers in JSON.

The PyTorch peer runs in its own virtual environment, so nothing of this project is imported for it.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BATCH, LENGTH = 32, 128
VOCABULARY, CLASSES = 8000, 2


def main():
    kind, argument = sys.argv[1:]
    steps = OurSteps(argument) if kind == "ours" else PeerSteps(argument)

    token_ids = np.random.default_rng(0).integers(2, VOCABULARY, (BATCH, LENGTH))
    labels = np.random.default_rng(1).integers(0, CLASSES, BATCH)
    for question in sys.stdin:
        if question.strip() == "steps":
            answer = _times(lambda: steps.step(token_ids, labels), 3)
        elif question.strip() == "losses":
            losses = [steps.step(token_ids, labels) for _ in range(10)]
            answer = [losses[0], losses[-1]]
        else:
            answer = getattr(steps, question.strip())()
        print(json.dumps(answer), flush=True)


def _times(call, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


class OurSteps:
    def __init__(self, precision):
        from pipeline.runtime import start_tensorflow

        start_tensorflow()
        from pipeline.classifier import build_classifier
        from pipeline.config import TrainingConfig
        from pipeline.train_step import TrainStep

        self._precision = precision
        model = build_classifier(_sizes(), VOCABULARY, CLASSES, seed=1, dtype=precision)
        self._step = TrainStep(model, TrainingConfig(precision=precision), np.ones(CLASSES))
        self._matmuls = None

    def step(self, token_ids, labels):
        loss, _ = self._step([(token_ids.astype(np.int32), labels.astype(np.int32))], 3e-4)
        return loss

    def matmul(self):
        """The products of a step, forward and backward, by themselves: floating point operations per second."""
        self._matmuls = self._matmuls or _our_products("bfloat16" if "bfloat" in self._precision else "float32")
        seconds = flops = 0
        for times, call, operations in self._matmuls:
            call()
            seconds += times * statistics.median(_times(call, 5))
            flops += times * operations
        return flops / seconds

    def operations(self):
        """Floating point operations in the products of a step: backward has two for each of the forward pass."""
        return 3 * sum(2 * times * batch * m * k * n for times, batch, m, k, n in _products())

    def versions(self):
        import tensorflow as tf

        return {"tensorflow": tf.__version__, "threads": tf.config.threading.get_intra_op_parallelism_threads()}


def _our_products(dtype):
    """Pairs of (how often, a call that does the product, its operations) for every product of a step."""
    import tensorflow as tf

    def product(batch, m, k, n, **transposed):
        shapes = [(m, k), (k, n)]
        flips = [transposed.get("transpose_a"), transposed.get("transpose_b")]
        shapes = [s[::-1] if flip else s for s, flip in zip(shapes, flips, strict=True)]
        a, b = (tf.cast(tf.ones((batch, *s) if batch > 1 else s), dtype) for s in shapes)
        multiply = tf.function(lambda: tf.matmul(a, b, **transposed))
        multiply()
        return multiply, 2 * batch * m * k * n

    found = []
    for times, batch, m, k, n in _products():
        for shape, flip in (
            ((m, k, n), {}),
            ((m, n, k), {"transpose_b": True}),  # the gradient of the left factor
            ((k, m, n), {"transpose_a": True}),  # and of the right one
        ):
            found.append((times, *product(batch, *shape, **flip)))
    return found


def _sizes():
    from pipeline.config import ModelConfig

    return ModelConfig(max_length=LENGTH)  # the reference model, on texts as long as the peer's


def _products():
    """The matrix products of a forward pass: (how often, batch, rows, inner, columns)."""
    sizes = _sizes()
    tokens, d, f, n = BATCH * LENGTH, sizes.d_model, sizes.d_ff, sizes.num_layers
    heads, size = BATCH * sizes.num_heads, d // sizes.num_heads
    return [
        (4 * n, 1, tokens, d, d),
        (n, 1, tokens, d, f),
        (n, 1, tokens, f, d),
        (n, heads, LENGTH, size, LENGTH),
        (n, heads, LENGTH, LENGTH, size),
    ]


class PeerSteps:
    def __init__(self, path):
        import importlib.util

        import torch

        torch.set_num_threads(os.cpu_count())
        spec = importlib.util.spec_from_file_location("peer", path)
        peer = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(peer)
        self._torch = torch
        torch.manual_seed(1)
        self._model = peer.Classifier(VOCABULARY, CLASSES)  # its defaults are the reference sizes
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, weight_decay=1e-2)
        self._model.train()

    def step(self, token_ids, labels):
        torch = self._torch
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._model(torch.from_numpy(token_ids))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()

    def versions(self):
        return {"torch": self._torch.__version__, "threads": self._torch.get_num_threads()}


if __name__ == "__main__":
    main()
