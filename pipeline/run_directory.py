"""The run directory as a whole: begun, gone on with or set aside, and what it remembers of its beginning."""

import contextlib
import shutil

from pipeline import checkpoint, dataset
from pipeline.contract import next_version, versions
from pipeline.errors import JobError
from pipeline.files import read_json, remove_staged, write_json
from pipeline.gatekeeper import EVALUATION
from pipeline.identity import JOB, another_job, changes, read_record
from pipeline.publication import newest_of_the_past

RUN = "run.json"


class RunDirectory:
    """`work_dir/name`.

    Args:
        config: a `JobConfig`.
        console: shows notes; see `pipeline.console`.
    """

    def __init__(self, config, console):
        self.config = config
        self.console = console
        self.path = config.run_dir
        self.data_dir = config.run_dir / "data"

    def open(self, data_key, train_key, fresh):
        """Continues the run that is there, or starts a new one; an old one is set aside, not deleted.

        Args:
            data_key: fingerprint of the data as it is now.
            train_key: fingerprint of the training as it would be now.
            fresh: start a new one in any case.

        Raises:
            JobError: the run that is there is unfinished, and of another job or other data.
        """
        is_new = fresh or self._was_just_set_aside()
        if checkpoint.is_trained_in(self.path):  # without, there is nothing to lose
            changed, new_data = changes(self.config, self.path, data_key, train_key)
            if (changed or new_data) and not fresh and not self._may_be_replaced(changed, new_data):
                raise another_job(self.path, [*changed, *new_data])
            is_new = bool(changed or new_data) or fresh
            if is_new:
                self._set_aside("a changed job" if changed else "new data" if new_data else "--fresh")
        self.path.mkdir(parents=True, exist_ok=True)
        for directory in (self.path, (self.path / EVALUATION).parent):
            remove_staged(directory)
        if is_new:
            # What an equal job published before, e.g. on the data of last week, does not count for this run. What is
            # live does, if it was not to be made anew: a refused week may be followed by the data of the week before.
            model_dir = self.config.model_dir
            self._remember(above_version=next_version(model_dir) - 1 if fresh else newest_of_the_past(model_dir))
        resolved = self.config.resolved()
        if read_json(self.path / JOB) != resolved:
            write_json(self.path / JOB, resolved)

    def _was_just_set_aside(self):
        """True when a process that began a new run was stopped before it had written so; `job.json` comes last."""
        is_begun = (self.path / JOB).exists() or read_record(self.path / RUN, "above_version") is not None
        return not is_begun and self._previous().exists()

    def _previous(self):
        return self.path.with_name(f"{self.path.name}.previous")

    def _may_be_replaced(self, changed, new_data):
        """True of a finished run, and of one whose data the gate refused when there is other data now."""
        if not (self.path / EVALUATION).exists():
            return False
        report = read_record(self.path / EVALUATION, "gate")
        is_measured = report is None or "test" in report
        return is_measured or bool(new_data) and not changed

    def _set_aside(self, reason):
        aside = self._previous()
        shutil.rmtree(aside, ignore_errors=True)
        self.path.rename(aside)
        self.console.note(f"starting a new run ({reason}); the one before is in {aside}")

    def _remember(self, **entries):
        record = read_record(self.path / RUN) or {}
        if record != record | entries:
            write_json(self.path / RUN, record | entries)

    def above_version(self):
        """Versions up to this number were there before this run, and do not count as what it made."""
        number = (read_record(self.path / RUN, "above_version") or {"above_version": 0})["above_version"]
        return number if isinstance(number, int) else 0  # a damaged record counts as none

    def fix_labels(self):
        """Makes the order of the labels in `data/` that of the run, whatever becomes of `data/` and the live version.

        Checkpoints count on it.
        """
        self._remember(labels=dataset.load_labels(self.data_dir))

    def first_labels(self, data_key):
        """Returns the labels that have their index already: of this run once it trains, until then of the live version.

        Args:
            data_key: fingerprint of the data as it is now.

        Raises:
            JobError: the run trains, and all records of the order are lost.
        """
        if not checkpoint.is_trained_in(self.path):
            return self._live_labels()
        if (record := read_record(self.path / RUN, "labels")) is not None:
            return record["labels"]
        if dataset.prepared(self.data_dir, data_key) is not None:
            return dataset.load_labels(self.data_dir)
        if versions(self.config.model_dir):
            raise JobError(
                f"the order of the labels that {checkpoint.where_it_stands(self.path)} were trained with cannot be "
                f"told, since {RUN} and data/ are lost or damaged. Start over with `python -m pipeline run JOB.toml "
                "--fresh` (the old run is kept aside)."
            )
        return []

    def _live_labels(self):
        from serving.data_gate import live_labels

        return live_labels(self.config.model_dir)

    @contextlib.contextmanager
    def data_to_check(self, data_key):
        """Yields (`data/`, its first labels), or those of a directory beside the run that was trained on other data."""
        if not checkpoint.is_trained_in(self.path) or dataset.prepared(self.data_dir, data_key) is not None:
            yield self.data_dir, self.first_labels(data_key)
            return
        beside = self.path.with_name(f".{self.config.name}.check")
        shutil.rmtree(beside, ignore_errors=True)  # of a check that was killed
        try:
            yield beside, self._live_labels()
        finally:
            shutil.rmtree(beside, ignore_errors=True)
