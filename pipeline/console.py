"""What a command shows: a progress bar on a terminal, plain lines in a log file; always on stderr."""

import contextlib
import os
import sys

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Notes, warnings and training progress on stderr; results go to stdout.

    Args:
        quiet: show nothing on stderr.
    """

    def __init__(self, quiet=False):
        self._rich = RichConsole(
            stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet
        )

    def note(self, line):
        """Shows one line."""
        self._rich.print(line)

    def warn(self, line):
        """Shows one line that asks for attention."""
        self._rich.print(f"warning: {line}")

    def error(self, message):
        """Shows why the command failed, as one line."""
        self._rich.print(f"error: {' '.join(message.split())}")

    def result(self, line):
        """Prints one line of the command's result on stdout."""
        try:
            print(line, flush=True)
        except OSError:  # nobody reads the summary; the work it tells of is done
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or Python's exit tries again, and fails

    @contextlib.contextmanager
    def training(self, label):
        """Yields the progress of a training; `label` is what its epochs are called."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
        )
        with Progress(*columns, console=self._rich, transient=True, disable=not self._rich.is_terminal) as bar:
            yield _TrainingProgress(self, label, bar, bar.add_task("training", total=None, loss=float("nan")))


class _TrainingProgress:
    def __init__(self, console, label, bar, task):
        self._console = console
        self._label = label
        self._bar = bar
        self._task = task

    def expect(self, steps):
        """Sets the number of steps at the end of the bar."""
        self._bar.update(self._task, total=steps)

    def step(self, progress, loss):
        """Moves the bar to `progress.step`."""
        description = f"{self._label} {progress.epoch + 1}"
        self._bar.update(self._task, completed=progress.step, loss=loss, description=description)

    def epoch(self, progress, figures):
        """Shows one line for a finished epoch, above the bar."""
        macro_f1 = f", macro-F1 {figures['macro_f1']:.4f}" if "macro_f1" in figures else ""
        self._console.note(
            f"{self._label} {progress.epoch + 1}, step {progress.step}: validation loss {figures['loss']:.4f}, "
            f"accuracy {figures['accuracy']:.4f}{macro_f1}"
        )
