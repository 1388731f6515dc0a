"""`python -m pipeline cost`: the formulas of `pipeline.cost` as a table, measured figures beside them, and what to
change where a budget is exceeded."""

import dataclasses

from pipeline.cost import formulas
from pipeline.cost.measurement import measure_length
from pipeline.cost.remedies import Sizes, describe, remedies, remedy_of_all, ways_to_less_memory, ways_to_less_work
from pipeline.errors import Interrupted, JobError, PipelineError

# Measured on a CPU with TensorFlow 2.21, from 10 to 40 MB a layer: benchmarks/NOTES.md.
_PROGRAM_BYTES, _GRAPH_BYTES = 0.65e9, 40e6
_PROGRAM = (
    "The program itself comes on top: some 0.65 GB for TensorFlow and up to 40 MB a layer for its graphs. A budget of "
    "--memory-gb is for all of it."
)
_MEASURED = (
    "Measured on this machine, memory as the process's VmHWM; a step adds activations, gradients and workspace to what "
    "lies in memory between steps:"
)
# benchmarks/NOTES.md, "The ONNX files".
_INT8 = (
    "serve onnx/model.int8.onnx: it took 0.38 to 0.58 of model.onnx's time for one text of the reference model, and "
    "needs no other training"
)
_BATCH = "grows with training.batch_tokens and model.num_layers"
_WHY = {
    "attention weights": f"{_BATCH}, model.num_heads and the length",
    "feed-forward": f"{_BATCH} and model.d_ff",
    "normalization": f"{_BATCH} and model.d_model",
    "heads": f"{_BATCH} and model.d_model",
    "dropout masks": f"{_BATCH}, where a layer drops more than {formulas.MASK_WINDOW:,} values",
    "inputs of layers": f"{_BATCH} and model.d_model",
    "pooling": "grows with training.batch_tokens and model.d_model",
    "backward workspace": "grows with training.batch_tokens",
    "dropout tables": "one of a fixed size for each dropout rate; rates of 0, or equal ones, need less",
    **dict.fromkeys(
        ("weights", "optimizer moments", "gradients", "gradient sums", "averaged weights"), "grows with the parameters"
    ),
}


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked about a job.

    Attributes:
        lengths: tokens, ascending.
        measure: whether training steps and answers are timed, too.
        memory_gb: what a training step may need, in 10^9 bytes; 0 = no budget.
        latency_ms: what one text may take; 0 = no budget.
    """

    lengths: list
    measure: bool
    memory_gb: float
    latency_ms: float

    @classmethod
    def parse(cls, lengths, measure, memory_gb, latency_ms, max_length):
        """Checks a command line; `lengths` are numbers between commas, "" an eighth, a quarter, half and all of
        `max_length`.

        Raises:
            JobError: a length is no number in [1, max_length], or a latency is to be judged without measuring one.
        """
        names = [str(max(1, max_length // part)) for part in (8, 4, 2, 1)] if lengths == "" else lengths.split(",")
        numbers = sorted({int(name) if name.strip().isdecimal() and len(name) < 10 else 0 for name in names})
        if numbers[0] < 1 or numbers[-1] > max_length:
            raise JobError(
                f"--lengths must be whole numbers from 1 to model.max_length={max_length}, between commas; for longer "
                f"texts add --set model.max_length=N. Received: --lengths={lengths}"
            )
        if latency_ms and not measure:
            raise JobError(
                "--latency-ms needs --measure: formulas count multiply-adds, how long they take is the machine's. "
                f"Received: --latency-ms={latency_ms:g}"
            )
        return cls(numbers, measure, memory_gb, latency_ms)


def show_cost(config, question, console, stop=lambda: None):
    """Prints what a job costs at each length and, for each exceeded budget, why and what would help.

    Reads at most the job's tokenizer and its run's `data/report.json`; changes nothing. An exceeded budget is an answer
    and no error.

    Args:
        config: a `JobConfig`.
        question: a `Question`.
        console: prints the lines; see `pipeline.console`.
        stop: called after each measurement; may raise to end early.
    """
    sizes = Sizes.of(config)
    for line in [*_describe(sizes), *_formulas(sizes, question.lengths)]:
        console.result(line)
    measured = _measure(sizes, question.lengths, console, stop) if question.measure else {}
    lines = ["", *_measurements(sizes, measured)] if measured else []
    if question.memory_gb:
        lines += ["", *_judge_memory(sizes, question, measured)]
    if question.latency_ms and measured:
        lines += ["", *_judge_latency(sizes, question.latency_ms, measured)]
    for line in lines:
        console.result(line)


def _measure(sizes, lengths, console, stop):
    """Returns {length: figures}, without the lengths that could not be measured."""
    measured = {}
    for length in lengths:
        console.note(f"measuring {length:,} tokens")
        try:
            measured[length] = measure_length(sizes.config, length, sizes.vocab_size, sizes.num_classes)
        except Interrupted:
            raise
        except PipelineError as e:
            stop()  # the error may be what became of a signal
            console.warn(f"no figures for {length} tokens: {e}")
        stop()
    return measured


def _describe(sizes):
    config, parts = sizes.config, sizes.parameters
    assumed = "" if sizes.is_prepared else " (assumed: there is no data/report.json yet)"
    total = f"{sum(parts.values()):,} parameters with {sizes.vocab_size:,} token ids and {sizes.num_classes} classes"
    step = f"a training step of {config.training.batch_tokens:,} padded tokens"
    return [
        f"{config.name}: {total}{assumed}",
        f"  {', '.join(f'{name} {count:,}' for name, count in parts.items())}",
        f"Multiply-adds and attention elements of one text; memory of {step}, and of one text's answer.",
        _PROGRAM,
        "",
    ]


def _formulas(sizes, lengths):
    """A line per length, from the formulas alone."""
    rows = [("tokens", "batch", "multiply-adds", "attention elements", "activations", "training step", "one text")]
    for length in lengths:
        texts = formulas.batch_rows(sizes.config.training, length)
        counts = sizes.multiply_adds(length), formulas.attention_elements(sizes.config.model, length)
        training = sum(sizes.training_memory(length).values())
        memory = sizes.activation_memory(length), training, sizes.inference_memory(length)
        rows.append((f"{length:,}", f"{texts:,} x {length:,}", *(f"{n:,}" for n in counts), *map(_megabytes, memory)))
    return _aligned(rows)


def _measurements(sizes, measured):
    """A line per length: what was measured, beside what the formulas say."""
    rows = [("tokens", "training step", "grew by", "formula", "ratio", "whole process", "one text")]
    for length, found in measured.items():
        formula = sizes.step_memory(length)
        memory = _megabytes(found["growth"]), _megabytes(formula), f"{found['growth'] / formula:.2f}"
        times = f"{found['step_ms']:,.0f} ms", f"{found['answer_ms']:,.1f} ms"
        rows.append((f"{length:,}", times[0], *memory, _megabytes(found["peak"]), times[1]))
    return [_MEASURED, *_aligned(rows)]


def _judge_memory(sizes, question, measured):
    """Lines about --memory-gb: the length that needs most counts, since a training meets its longest texts."""
    limit = question.memory_gb * 1e9

    def terms(length):
        parts = sizes.training_memory(length)
        # What no formula here knows, and no option changes.
        if length in measured:
            return {**parts, "program": measured[length]["peak"] - sum(parts.values())}
        return {**parts, "program": _PROGRAM_BYTES + sizes.config.model.num_layers * _GRAPH_BYTES}

    total, length = max((sum(terms(length).values()), length) for length in question.lengths)
    what = f"a training step at {length:,} tokens needs {_gigabytes(total)}"
    if total <= limit:
        return [f"within --memory-gb={question.memory_gb:g}: {what}"]
    parts = terms(length)
    program = parts.pop("program")
    largest = max(parts, key=parts.get)

    def figure(changed):
        return sum(changed.training_memory(length).values()) + program

    why = f"{_gigabytes(program)} for the program itself, {_gigabytes(parts[largest])} for {largest}: {_WHY[largest]}"
    return [
        f"over --memory-gb={question.memory_gb:g}: {what}, of which {why}",
        *_suggest(sizes, ways_to_less_memory(sizes.config, length), figure, limit, _gigabytes),
    ]


def _judge_latency(sizes, limit, measured):
    """Lines about --latency-ms: the longest measured length counts."""
    length = max(measured)
    slowest = measured[length]["answer_ms"]
    what = f"one text of {length:,} tokens takes {slowest:,.1f} ms on TensorFlow"
    if slowest <= limit:
        return [f"within --latency-ms={limit:g}: {what}"]
    work = formulas.multiply_adds(sizes.config.model, length, sizes.num_classes)
    largest = max(work, key=work.get)

    fixed = min(measured[length]["one_token_ms"], slowest)

    def figure(changed):
        return fixed + (slowest - fixed) * changed.multiply_adds(length) / sizes.multiply_adds(length)

    why = f"{work[largest] / sum(work.values()):.0%} of its multiply-adds are for {largest}"
    return [
        f"over --latency-ms={limit:g}: {what}; {why}",
        f"  {_INT8}",
        *_suggest(sizes, ways_to_less_work(sizes.config, length), figure, limit, lambda ms: f"{ms:,.1f} ms"),
        f"  Of these, {fixed:,.1f} ms are what a text of one token takes; the rest goes with the multiply-adds.",
    ]


def _suggest(sizes, ways, figure, limit, shown):
    """Lines: each way that suffices alone; else all it takes; else that nothing does."""
    found = remedies(sizes, ways, figure, limit)
    if found:
        return [f"  {describe(r.settings)}: {shown(r.figure)}; {r.price}" for r in found]
    together = remedy_of_all(sizes, ways, figure, limit)
    if together.figure <= limit:
        return [f"  no single option suffices; together {describe(together.settings)}: {shown(together.figure)}"]
    settings = describe(together.settings) or "this job's settings"
    return [f"  no option suffices: with {settings} it is still {shown(together.figure)}"]


def _megabytes(count):
    return f"{count / 1e6:,.1f} MB"


def _gigabytes(count):
    return f"{count / 1e9:,.3g} GB"


def _aligned(rows):
    """Returns a line per row of cells, columns of equal width, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
