"""Training speed against a PyTorch peer in the same run: real tokens per second, identical batches, model FLOP/s.

    .venv/bin/python benchmarks/training.py --peer torch_peer.py --peer-python torch-venv/bin/python --data sst2 trec

`--peer` is a script with the commands and the `Classifier` of benchmarks/NOTES.md ("The peer"); `--peer-python` is the
interpreter of a virtual environment with torch and sentencepiece. `--data` are folders with train.csv, validation.csv
and test.csv (columns text, label). Without a peer only our own figures are printed. Prints one JSON object.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from steps import BATCH, CLASSES, LENGTH, VOCABULARY

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.batches import epoch_plan  # noqa: E402

BATCH_TOKENS = 4096  # the default
PRECISIONS = ("float32", "mixed_bfloat16")
LOG_EVERY = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="the PyTorch script")
    parser.add_argument("--peer-python", default=sys.executable, help="Python with torch")
    parser.add_argument("--data", nargs="*", default=[], help="folders with train, validation and test.csv")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the comparison on identical batches")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--peer-steps", type=int, default=40, help="steps of the peer's timed runs on --data")
    parser.add_argument("--peer-full", action="store_true", help="also train the peer to the end, for its accuracy")
    options = parser.parse_args()
    report = {"cpus": os.cpu_count(), "identical_batches": _identical_batches(options)}
    report["data"] = {Path(d).name: _data_set(Path(d).resolve(), options) for d in options.data}
    print(json.dumps(report, indent=2))


# Identical padded batches: a process for each contender, which take turns.


def _identical_batches(options):
    workers = {precision: _Worker(sys.executable, "ours", precision) for precision in PRECISIONS}
    if options.peer:
        workers["peer"] = _Worker(options.peer_python, "peer", options.peer)
    losses = {name: worker.ask("losses") for name, worker in workers.items()}
    for name, (first, last) in losses.items():  # the answer before the time
        if not (abs(first - math.log(CLASSES)) < 1.0 and last < first):
            raise SystemExit(f"{name} does not learn: loss {first} -> {last}")
    times = {name: [] for name in workers}
    rates = {precision: [] for precision in PRECISIONS}
    for _ in range(options.rounds):
        for name, worker in workers.items():
            times[name] += worker.ask("steps")
            if name in rates:
                rates[name].append(worker.ask("matmul"))
    report = {"batch": [BATCH, LENGTH], "step_ms": {n: round(1e3 * statistics.median(t), 1) for n, t in times.items()}}
    flops = workers["float32"].ask("operations")
    for precision in PRECISIONS:
        rate, step = statistics.median(rates[precision]), statistics.median(times[precision])
        report[precision] = {
            "matmul_gflops": round(rate / 1e9, 1),
            "model_gflops": round(flops / step / 1e9, 1),
            "share_of_matmul_rate": round(flops / step / rate, 3),
        }
        if options.peer:
            report[precision]["times_peer"] = round(statistics.median(times["peer"]) / step, 2)
    report["versions"] = {name: worker.ask("versions") for name, worker in workers.items()}
    return report


class _Worker:
    def __init__(self, *arguments):
        python, *arguments = arguments
        command = [python, Path(__file__).with_name("steps.py"), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question):
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        time.sleep(0.3)  # until its threads have stopped spinning
        if not line:
            raise SystemExit("a contender ended; see above")
        return json.loads(line)


# Whole trainings on real data.


def _data_set(directory, options):
    """Ours with the default batch and with as many rows in a batch as the peer has, in each precision; and the peer."""
    report = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-training-") as work:
        rows_batch = None
        for precision in PRECISIONS:
            for batch in ("default", "rows of the peer"):
                batch_tokens = BATCH_TOKENS if batch == "default" else rows_batch
                name = f"{precision.replace('_', '-')}-{batch_tokens}"
                figures = _train(directory, Path(work), name, precision, batch_tokens, options.epochs)
                rows_batch = rows_batch or math.ceil(BATCH * figures.pop("mean_length"))
                figures.pop("mean_length", None)
                report[f"{precision}, batch: {batch}"] = figures
                if options.peer:
                    report.setdefault("peer", []).append(_peer(directory, options, options.peer_steps))
    if options.peer:
        timed = statistics.median(run["real_tokens_per_s"] for run in report["peer"])
        report["peer"] = {"real_tokens_per_s": timed, "padded_share": report["peer"][0]["padded_share"]}
        if options.peer_full:
            report["peer"]["accuracy"] = _peer(directory, options, 0)["accuracy"]
        for figures in (f for name, f in report.items() if name != "peer"):
            figures["times_peer"] = round(figures["real_tokens_per_s"] / timed, 2)
    return report


def _train(directory, work, name, precision, batch_tokens, epochs):
    job = work / f"{name}.toml"
    job.write_text(
        f'name = "{name}"\nwork_dir = "{work}/runs"\n'
        f'[data]\ntrain = "{directory}/train.csv"\nvalidation = "{directory}/validation.csv"\n'
        f'test = "{directory}/test.csv"\n[tokenizer]\nvocab_size = {VOCABULARY}\n[model]\nmax_length = {LENGTH}\n'
        f'[training]\nepochs = {epochs}\nbatch_tokens = {batch_tokens}\nprecision = "{precision}"\npatience = 0\n'
        f"log_every_steps = {LOG_EVERY}\n"
    )
    arguments = [job]
    done = _pipeline("prepare", *arguments)
    if found := re.search(r"Set tokenizer.vocab_size to at most (\d+)", done.stderr):  # the peer's shrinks by itself
        arguments.append(f"--set=tokenizer.vocab_size={found[1]}")
        done = _pipeline("prepare", *arguments)
    if done.returncode:
        raise SystemExit(done.stderr)
    run_dir = work / "runs" / name
    first_s, resident = _watch(["train", *arguments], run_dir / "metrics.jsonl")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["kind"] == "validation"]
    seconds = {key: sum(row[key] for row in epochs) for key in ("training_s", "waiting_s", "saving_s")}
    lengths = np.diff(np.load(run_dir / "data" / "train" / "offsets.npy"))
    plan = epoch_plan(lengths, batch_tokens, 17, 0)
    # The first epoch traces; the peer compiles nothing.
    rates = [lengths.sum() / (row["training_s"] + row["waiting_s"]) for row in epochs[1:]]
    return {
        "real_tokens_per_s": round(statistics.median(rates)),
        "padded_share": round(1 - lengths.sum() / sum(len(rows) * lengths[rows].max() for rows in plan), 4),
        "waiting_share": round(seconds["waiting_s"] / sum(seconds.values()), 5),
        "saving_share": round(seconds["saving_s"] / sum(seconds.values()), 5),
        "steps": epochs[-1]["step"],
        "validation_accuracy": max(row["accuracy"] for row in epochs),
        "start_to_fifth_step_s": round(first_s, 1),
        "memory_growth_after_step_100": resident,
        "mean_length": float(lengths.mean()),
    }


def _watch(arguments, metrics):
    """Runs a command to its end; returns (seconds to its first row of metrics, growth of its memory or None).

    The growth is the share by which the median resident memory of the last tenth exceeds that right after step 100.
    """
    start, first_s, resident = time.monotonic(), None, []
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "pipeline", *arguments], cwd=ROOT, stderr=stderr)
        while process.poll() is None:
            time.sleep(0.1)
            lines = metrics.read_bytes().splitlines() if metrics.exists() else []
            if lines and first_s is None:
                first_s = time.monotonic() - start
            if len(lines) > 100 / LOG_EVERY:
                resident.append(_resident(process.pid))
        if process.returncode:
            stderr.seek(0)
            raise SystemExit(stderr.read())
    resident = [r for r in resident if r]
    tenth = len(resident) // 10
    if not tenth:
        return first_s, None
    return first_s, round(statistics.median(resident[-tenth:]) / statistics.median(resident[:tenth]) - 1, 4)


def _resident(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return None
    found = re.search(r"VmRSS:\s*(\d+)", status)
    return int(found[1]) if found else None


def _pipeline(*arguments):
    command = [sys.executable, "-m", "pipeline", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def _peer(directory, options, steps):
    command = [options.peer_python, options.peer, "train", "--data", directory, "--epochs", str(options.epochs)]
    done = subprocess.run([*command, "--max-steps", str(steps)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
