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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from steps import BATCH, CLASSES, LENGTH, VOCABULARY

ROOT = Path(__file__).resolve().parents[1]
BATCH_TOKENS = 4096  # the default
PRECISIONS = ("float32", "mixed_bfloat16")
WARM_UP = 3


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
         "log_every_steps = 5\n"
    )
    for command in ("prepare", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", command, job], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr)
    run_dir = work / "runs" / name
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"][WARM_UP:]
    validations = [row for row in rows if row["kind"] == "validation"]
    seconds = {key: sum(row[key] for row in validations) for key in ("training_s", "waiting_s", "saving_s")}
    split = json.loads((run_dir / "data" / "report.json").read_text())["splits"]["train"]
    return {
        "real_tokens_per_s": round(statistics.median(row["real_tokens_per_s"] for row in steps)),
        "padded_share": round(statistics.mean(row["padded_share"] for row in steps), 4),
        "waiting_share": round(seconds["waiting_s"] / sum(seconds.values()), 5),
        "saving_share": round(seconds["saving_s"] / sum(seconds.values()), 5),
        "steps": validations[-1]["step"],
        "validation_accuracy": max(row["accuracy"] for row in validations),
        "mean_length": split["tokens"] / split["rows"],
    }


def _peer(directory, options, steps):
    command = [options.peer_python, options.peer, "train", "--data", directory, "--epochs", str(options.epochs)]
    done = subprocess.run([*command, "--max-steps", str(steps)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
