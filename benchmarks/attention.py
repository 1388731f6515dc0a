"""Time and peak memory of each kind of attention against keras.layers.MultiHeadAttention, in the same run, on a CPU.

    .venv/bin/python benchmarks/attention.py
    .venv/bin/python benchmarks/attention.py --kinds full keras --lengths 256 512 --repeat 15

One text of T tokens that is padded at its end, d_model 256, 8 heads, no dropout; forward, and forward with gradients of
weights and input. Contenders take turns and are compared with a dense computation before anything is timed (linear:
with its own formula). Peak memory is measured in a process of its own for each case: how much more
than before a run it holds at most. Of keras and full, a case whose [N, T, T] matrices would take more than
`--largest-gib` together is left out, with a note. Figures are medians; shares are of Keras's layer. Prints one JSON
object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

D_MODEL, HEADS = 256, 8
WINDOW, GLOBAL = 64, 1
KINDS = ("keras", "full", "chunked", "local", "local_global", "linear")
# Pass -> float32 [N, T, T] that the dense kinds hold at once; "backward" is forward and backward.
PASSES = {"forward": 3, "backward": 5}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="*", type=int, default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="keras is always in it")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--largest-gib", type=float, default=4.0)
    parser.add_argument("--memory-of", nargs="*", metavar="KIND LENGTH PASS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        kind, length, *passes = options.memory_of
        print(json.dumps({which: _own_peak(kind, which, int(length)) for which in passes}))
        return
    kinds = [kind for kind in KINDS if kind in ("keras", *options.kinds)]
    report = {"cpus": os.cpu_count(), "repeat": options.repeat, "window": WINDOW, "global_tokens": GLOBAL}
    report["lengths"] = {length: _length(kinds, length, options) for length in options.lengths}
    import keras
    import tensorflow as tf

    threads = tf.config.threading.get_intra_op_parallelism_threads()
    report["versions"] = {"tensorflow": tf.__version__, "keras": keras.__version__, "threads": threads}
    print(json.dumps(report, indent=2))


def _length(kinds, length, options):
    sizes = {which: matrices * HEADS * length * length * 4 for which, matrices in PASSES.items()}
    fitting = {which: sizes[which] <= options.largest_gib * 2**30 for which in PASSES}
    fitting = {
        kind: [which for which in PASSES if fitting[which] or kind not in ("keras", "full")] for kind in kinds
    }
    memory = {kind: _peaks(kind, length, passes) for kind, passes in fitting.items() if passes}
    report = {}
    for which in PASSES:
        report[which] = _pass([kind for kind in kinds if which in fitting[kind]], which, length, options.repeat, memory)
        if which not in fitting["keras"]:
            report[which]["note"] = f"keras and full left out: {sizes[which] >> 20} MiB of matrices"
        print(length, which, json.dumps(report[which]), file=sys.stderr, flush=True)
    return report


def _pass(kinds, which, length, repeat, memory):
    x, attend = _inputs(length)
    layers = {kind: _layer(kind, x) for kind in kinds}
    for kind, layer in layers.items():
        _compare(kind, layer, x, attend)
    calls = {kind: _call(layer, kind, which) for kind, layer in layers.items()}
    times = {kind: [] for kind in kinds}
    repeats = max(1, 1024 // length)  # a short run is repeated within its turn
    for i in range(repeat + 1):
        for kind in kinds[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            for _ in range(repeats):
                calls[kind](x, attend)
            times[kind].append((time.perf_counter() - start) / repeats)
    medians = {kind: statistics.median(t[1:]) for kind, t in times.items()}  # without the warm-up
    memory = {kind: memory[kind][which] for kind in kinds}
    report = {kind: {"ms": round(1e3 * medians[kind], 2), "memory_mb": round(memory[kind], 1)} for kind in kinds}
    for kind in kinds if "keras" in kinds else []:
        shares = {"time": medians[kind] / medians["keras"], "memory": memory[kind] / max(memory["keras"], 1.0)}
        report[kind]["shares"] = {key: round(share, 3) for key, share in shares.items()}
    return report


def _inputs(length):
    import numpy as np
    import tensorflow as tf

    x = np.random.default_rng(length).normal(size=(1, length, D_MODEL)).astype(np.float32)
    return tf.constant(x), tf.constant(np.arange(length)[None, None] < length - length // 16)


def _layer(kind, x):
    """A built layer; all kinds have the same weights."""
    import keras

    from pipeline.layers import ChunkedAttention, LinearAttention, LocalAttention, MultiHeadAttention

    cores = {
        "full": lambda: None,
        "chunked": ChunkedAttention,
        "local": lambda: LocalAttention(WINDOW),
        "local_global": lambda: LocalAttention(WINDOW, GLOBAL),
        "linear": LinearAttention,
    }
    ours = MultiHeadAttention(D_MODEL, HEADS, seed=1, core=cores["full" if kind == "keras" else kind]())
    ours.build(x.shape)
    if kind != "keras":
        return ours
    theirs = keras.layers.MultiHeadAttention(HEADS, D_MODEL // HEADS)
    theirs.build(x.shape, x.shape)
    # The same values under the same names: [D, N, H] there, [D, N * H] here.
    for own, weight in zip(ours.weights, theirs.weights, strict=True):
        weight.assign(own.numpy().reshape(weight.shape))
    return theirs


def _forward(layer, kind, x, attend):
    return layer(x, x, attention_mask=attend) if kind == "keras" else layer(x, attend=attend)


def _call(layer, kind, which):
    """Returns the compiled pass, a call of (x, attend)."""
    import tensorflow as tf

    def backward(x, attend):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(_forward(layer, kind, x, attend) ** 2)
        return tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])

    return tf.function(backward if which == "backward" else lambda x, attend: _forward(layer, kind, x, attend))


def _compare(kind, layer, x, attend):
    """Compares the answer, on the last 1,024 tokens at most, with a dense one."""
    import numpy as np

    x, attend = x[:, -1024:], attend[:, :, -1024:]
    dense = _layer("full", x)
    allowed = attend
    if kind == "linear":
        dense.core = _dense_linear
    elif kind in ("local", "local_global"):
        t, s = np.ogrid[: x.shape[1], : x.shape[1]]
        first = GLOBAL if kind == "local_global" else 0
        allowed = attend & ((np.abs(t - s) <= WINDOW) | (t < first) | (s < first))[None]
    difference = np.abs(_forward(layer, kind, x, attend) - dense(x, attend=allowed)).max()
    if not difference <= 1e-5:
        raise SystemExit(f"{kind} answers differently: by {difference}")


def _dense_linear(query, key, value, attend, training):
    import tensorflow as tf

    weights = tf.matmul(tf.nn.elu(query) + 1, tf.nn.elu(key) + 1, transpose_b=True)
    weights *= tf.cast(attend, tf.float32)[:, None]
    return tf.matmul(weights / tf.reduce_sum(weights, axis=-1, keepdims=True), value)


def _peaks(kind, length, passes):
    """Returns pass -> MB, from a process of its own."""
    command = [sys.executable, __file__, "--memory-of", kind, str(length), *passes]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _own_peak(kind, which, length):
    from pipeline.runtime import trim_memory

    call = _call(_layer(kind, _inputs(128)[0]), kind, which)
    call(*_inputs(128))  # what TensorFlow needs for itself
    x, attend = _inputs(length)
    trim_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _resident("VmRSS")
    call(x, attend)
    return _resident("VmHWM") - before


def _resident(name):
    """Returns MB of memory: VmRSS now, VmHWM at the peak."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) / 1024


if __name__ == "__main__":
    from pipeline.runtime import start_tensorflow

    start_tensorflow()
    main()
