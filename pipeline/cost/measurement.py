"""What a job's training step and one text's answer really take: seconds and memory, each length in a fresh process."""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from pipeline.config import JobConfig
from pipeline.cost.formulas import batch_rows
from pipeline.errors import PipelineError
from pipeline.files import read_json, write_json
from pipeline.fresh_process import FreshProcess, run_fresh

_STEPS, _ANSWERS = 5, 21


def measure_length(config, length, vocab_size, num_classes):
    """Measures texts of `length` random tokens, in a process of their own: memory that one has had, it keeps.

    Args:
        config: a `JobConfig`; its data are not needed.
        length: tokens of each text.
        vocab_size: number of token ids.
        num_classes: number of labels.

    Returns:
        {"step_ms": median time of 5 training steps after a first one, of `accumulate_batches` batches each;
        "answer_ms": median time of one text through the compiled model, on TensorFlow; "one_token_ms": that of a text
        of one token; "growth": bytes by which the process grew in these steps at most, over what it had after a step
        of one token; "peak": all of its bytes then}.
        The memory is the host's.

    Raises:
        PipelineError: the process came to no answer; one stopped from outside may have run out of memory.
    """
    with tempfile.TemporaryDirectory() as directory:
        job, answer = Path(directory) / "job.json", Path(directory) / "answer.json"
        write_json(job, config.resolved())
        with FreshProcess("pipeline.cost.measurement", job, length, vocab_size, num_classes, answer) as process:
            if failure := process.wait():
                raise PipelineError(f"measuring {length} tokens failed: {failure}.")
        return read_json(answer)


def main(job, length, vocab_size, num_classes, answer):
    """The process: measures one length, writes a JSON object to `answer`."""
    from pipeline.runtime import start_tensorflow, trim_memory

    start_tensorflow()
    import numpy as np

    from pipeline.calibrated import build_calibrated
    from pipeline.classifier import compile_predict
    from pipeline.train_step import TrainStep

    config, length = JobConfig.model_validate_json(Path(job).read_text(encoding="utf-8")), int(length)
    training = config.training.model_copy(update={"teacher": ""})  # its answers cost nothing in a step
    model = build_calibrated(
        config.model,
        int(vocab_size),
        int(num_classes),
        seed=config.seed,
        dtype=training.precision,
        recompute=training.recompute,
    )
    train_step, predict = TrainStep(model.encoder, training, np.ones(int(num_classes))), compile_predict(model)
    token_ids = np.random.default_rng(0).integers(2, int(vocab_size), (batch_rows(training, length), length), np.int32)
    batches = [(token_ids, np.zeros(len(token_ids), np.int32))] * training.accumulate_batches
    # The first step traces the graph and makes what stays; with one token nothing else of it counts.
    train_step([(token_ids[:1, :1], np.zeros(1, np.int32))] * training.accumulate_batches, training.learning_rate)
    trim_memory()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the highest VmRSS so far, begins anew
    step_ms = _median_ms(lambda: train_step(batches, training.learning_rate), _STEPS)
    peak = _memory("VmHWM")
    found = {"step_ms": step_ms, "growth": peak - before, "peak": peak}
    for name, text in (("answer_ms", token_ids[:1]), ("one_token_ms", token_ids[:1, :1])):
        found[name] = _median_ms(lambda text=text: predict(text).numpy(), _ANSWERS)
    write_json(answer, found)


def _memory(name):
    """Returns a line of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _median_ms(call, times):
    call()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    run_fresh(main, *sys.argv[1:])
