"""The commands of `python -m pipeline`: their options, their signals and the exit code each of them ends with."""

import contextlib
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated

import typer

from pipeline.config import load_job
from pipeline.console import Console
from pipeline.cost.report import Question, show_cost
from pipeline.errors import Interrupted, JobError, PipelineError
from pipeline.job import Job
from serving.transport import check_address

app = typer.Typer(
    help="Train a text classifier from a job file and publish it for TensorFlow Serving and ONNX Runtime.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

JobFile = Annotated[str, typer.Argument(metavar="JOB.toml", help="The job file.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="section.key=value", help="Overrides a key of the job file; repeatable.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over; the old run is kept aside.")]
Trials = Annotated[int, typer.Option(metavar="N", help="Trainings in all, those of earlier calls included.")]
Output = Annotated[
    str, typer.Option(metavar="FILE", help="The job file to write; by default JOB.tuned.toml.", show_default=False)
]
FreshTuning = Annotated[bool, typer.Option("--fresh", help="Start over; the old tuning is kept aside.")]
Force = Annotated[
    bool, typer.Option("--force", help="Publish although the gate refuses; the manifest records who did and why.")
]
WaitFor = Annotated[
    str,
    typer.Option(
        metavar="URL|host:port",
        help="Afterwards waits until this TensorFlow Serving serves the version: http://host:8501 or host:8500.",
    ),
]
WaitTimeout = Annotated[
    float, typer.Option("--wait-timeout-s", metavar="S", min=0.0, help="How long --wait-for waits.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

To = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="The version to go back to; by default the one before.", show_default=False),
]
Lengths = Annotated[
    str,
    typer.Option(metavar="T,T,...", help="Tokens of a text; by default parts of model.max_length.", show_default=False),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Also take training steps and answer texts, each length in a new process.")
]
MemoryBudget = Annotated[
    float,
    typer.Option(metavar="G", min=0.0, help="Tells what would help if a training step needs more.", show_default=False),
]
LatencyBudget = Annotated[
    float,
    typer.Option(metavar="M", min=0.0, help="Tells what would help if one text takes longer.", show_default=False),
]


@app.command()
def run(
    job: JobFile,
    set: Overrides = [],  # noqa: A002, B006
    fresh: Fresh = False,
    force: Force = False,
    wait_for: WaitFor = "",
    wait_timeout_s: WaitTimeout = 300.0,
    debug: Debug = False,
):
    """Does all that is left: prepare, train, evaluate, export, publish. Run it again to go on."""
    _execute(Job.run, job, set, debug, fresh, force, (wait_for, wait_timeout_s))


@app.command()
def check(job: JobFile, set: Overrides = [], debug: Debug = False):  # noqa: A002, B006
    """Shows in about a minute whether the job can learn; a run that is there stays as it was."""
    _execute(Job.check, job, set, debug)


@app.command()
def cost(
    job: JobFile,
    lengths: Lengths = "",
    measure: Measure = False,
    memory_gb: MemoryBudget = 0.0,
    latency_ms: LatencyBudget = 0.0,
    set: Overrides = [],  # noqa: A002, B006
    debug: Debug = False,
):
    """Shows parameters, multiply-adds and memory at some lengths of text, and what would need less; writes nothing.

    The exit code is 0 over a budget, too: that is an answer.
    """

    def show(job):
        question = Question.parse(lengths, measure, memory_gb, latency_ms, job.config.model.max_length)
        show_cost(job.config, question, job.console, job.stop)

    _execute(show, job, set, debug, locks_run=False)


@app.command()
def tune(
    job: JobFile,
    trials: Trials,
    output: Output = "",
    set: Overrides = [],  # noqa: A002, B006
    fresh: FreshTuning = False,
    debug: Debug = False,
):
    """Trains with other settings, one after the other, and writes the job that is best on the validation rows.

    Run it again to go on. The run of the job itself stays as it was.
    """
    target = Path(output) if output else Path(job).with_suffix(".tuned.toml")
    _execute(lambda work: work.tune(trials, target, job), job, set, debug, fresh, locks_run=False)


@app.command()
def prepare(job: JobFile, set: Overrides = [], fresh: Fresh = False, debug: Debug = False):  # noqa: A002, B006
    """Reads, checks and splits the data, trains the tokenizer, writes token arrays."""
    _execute(Job.prepare, job, set, debug, fresh)


@app.command()
def train(job: JobFile, set: Overrides = [], debug: Debug = False):  # noqa: A002, B006
    """Trains, or goes on from the newest good checkpoint."""
    _execute(Job.train, job, set, debug)


@app.command()
def evaluate(job: JobFile, set: Overrides = [], debug: Debug = False):  # noqa: A002, B006
    """Measures the best weights on the test rows and asks the gate."""
    _execute(Job.evaluate, job, set, debug)


@app.command()
def export(job: JobFile, set: Overrides = [], debug: Debug = False):  # noqa: A002, B006
    """Builds the candidate version and verifies every artifact in a fresh process."""
    _execute(Job.export, job, set, debug)


@app.command()
def publish(
    job: JobFile,
    set: Overrides = [],  # noqa: A002, B006
    force: Force = False,
    wait_for: WaitFor = "",
    wait_timeout_s: WaitTimeout = 300.0,
    debug: Debug = False,
):
    """Renames the candidate into its place under base_path/name."""
    _execute(Job.publish, job, set, debug, force=force, wait=(wait_for, wait_timeout_s))


@app.command()
def rollback(
    job: JobFile,
    to: To = 0,
    set: Overrides = [],  # noqa: A002, B006
    debug: Debug = False,
):
    """Publishes an old version again under a new number. Needs neither the run directory nor the data."""
    _execute(lambda job: job.rollback(to, _ignore_signals), job, set, debug, locks_run=False)


@app.command()
def versions(job: JobFile, set: Overrides = [], debug: Debug = False):  # noqa: A002, B006
    """Lists the versions with their figures, and says which is live."""
    _execute(Job.list_versions, job, set, debug, locks_run=False)


def _execute(stage, path, overrides, debug, fresh=False, force=False, wait=("", 0.0), locks_run=True):
    """Runs one stage and ends the process with the exit code of what happened.

    What has nothing to do with the run directory does not lock the run: it may be urgent while a training goes on.
    """
    console = Console()
    interruptions = []

    def on_signal(number, frame):
        _ignore_signals()
        name = signal.Signals(number).name
        interruptions.append(
            Interrupted(f"stopped by {name}; what was finished is kept. Run the same command again to go on.")
        )
        raise interruptions[0]

    def stop():
        # Python drops what is raised in a callback or a __del__; libraries run both at any moment.
        if interruptions:
            raise interruptions[0]

    def on_dropped(dropped):
        # `stop` raises an interruption again; of a second signal that comes while signals are being ignored Python
        # says that it was ignored.
        if not interruptions or not isinstance(dropped.exc_value, (Interrupted, OSError)):
            sys.__unraisablehook__(dropped)

    sys.unraisablehook = on_dropped  # it would print a traceback
    for number in _SIGNALS:
        signal.signal(number, on_signal)
    try:
        try:
            server, timeout_s = wait
            if server:
                check_address(server)
            job = Job(load_job(path, overrides), console, fresh, stop, force)
            with job.at_work() if locks_run else contextlib.nullcontext():
                job.do(stage)
                stop()
            if server:
                job.wait_until_served(server, timeout_s)  # without the lock: it only looks
                stop()
        finally:
            _ignore_signals()  # in here: what comes until they are ignored is caught below like any other
    except Exception as e:
        if debug:
            traceback.print_exc()
        # What a signal raised may have been caught on its way, and reported as an error of another kind.
        sys.exit(_report(interruptions[0] if interruptions else e, console, path))


def _ignore_signals():
    # Once is enough: a second signal must not disturb what cleans up after the first.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _report(error, console, path):
    if isinstance(error, PipelineError):
        console.error(str(error))
        return error.exit_code
    if isinstance(error, OSError):
        # Python names no file when a write fails: it is one of those that the job writes.
        place = error.filename or f"a file under the work_dir of {path} or in {tempfile.gettempdir()}"
        console.error(f"{place}: {error.strerror or error}. Check the path, its permissions and the room on the disk.")
        return 1
    # Some libraries' messages run over pages.
    console.error(f"unexpected {type(error).__name__}: {str(error)[:300]}. Run again with --debug for the traceback.")
    return 1


def main():
    """Runs the command line; wrong usage is one plain line like every other error."""
    try:
        app(standalone_mode=False)
    except Exception as e:
        if not hasattr(e, "format_message"):  # typer does not export the base of its usage errors
            raise
        command = e.ctx.command_path if e.ctx else "python -m pipeline"
        Console().error(f"{e.format_message().rstrip('.')}. See {command} --help.")
        sys.exit(JobError.exit_code)
