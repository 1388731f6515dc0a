"""The gate in a run: when it is asked, what its answer does, and what `evaluation/report.json` keeps of it."""

import shutil

from pipeline import dataset
from pipeline.contract import ONNX_FILES
from pipeline.errors import GateRefused
from pipeline.files import write_json

EVALUATION = "evaluation/report.json"
CANDIDATE = "candidate"


class Gatekeeper:
    """Asks `serving.gate` about the data, the figures and the candidate of a run directory.

    Args:
        config: a `JobConfig`.
        console: shows warnings; see `pipeline.console`.
        force: go on although the gate refuses; what was not verified is never let through.
    """

    def __init__(self, config, console, force):
        self.config = config
        self.console = console
        self.force = force
        self.run_dir = config.run_dir
        self.data_dir = config.run_dir / "data"

    def warn(self, data_dir):
        """Says why a version trained on `data_dir` would be refused, as far as the data alone tells."""
        for reason in self._check_data(data_dir)["reasons"]:
            self.console.warn(f"the gate will refuse to publish: {reason}")

    def ask_about_data(self, report):
        """Refuses labels and training rows that may not be published, before hours are spent on them.

        Args:
            report: the evaluation report if there is one, else {}: then the one on the gate alone says by its lack of
                figures that nothing was measured.

        Raises:
            GateRefused: and nothing overrules it.
        """
        gate = self._check_data(self.data_dir)
        if not gate["passed"] and self.force:
            self._warn_of_force(gate)
        elif not gate["passed"]:
            raise self._refusal(report, gate)

    def ask_about_model(self, report):
        """Asks about the trained model's figures, before it takes the time to export; arguments as in `_ask`."""
        return self._ask(report, report["test"], "the trained model")

    def ask_about_candidate(self, report):
        """Asks about the figures of the candidate's ONNX file, against the live version there is now."""
        from serving.gate import measure

        figures = measure(self.run_dir / CANDIDATE, *self._test_rows(), report["labels"])
        return self._ask(report, figures, ONNX_FILES["float32"])

    def refusal_of_unverified(self, report, error):
        """Returns the GateRefused for the VerificationError of a candidate; --force has no say in it."""
        shutil.rmtree(self.run_dir / CANDIDATE, ignore_errors=True)  # one made before
        gate = report["gate"]
        return self._refusal(report, {**gate, "passed": False, "reasons": [*gate["reasons"], str(error).rstrip(".")]})

    def _ask(self, report, figures, artifact):
        """Returns the gate's answer, which the report keeps.

        Args:
            report: the evaluation report.
            figures: of the artifact, from `pipeline.evaluation.metrics`.
            artifact: its name.

        Raises:
            GateRefused: and nothing overrules it.
        """
        from serving.gate import check_gate, measure_live, overruled

        labels, data_key = report["labels"], report["data_fingerprint"]
        live = measure_live(self.config.model_dir, *self._test_rows(), labels, data_key, report.get("live"))
        report = {**report, "live": live}
        counts, baseline = _label_counts(self.data_dir), report.get("baseline")
        gate = check_gate(self.config, labels, counts, figures, artifact, live, baseline)
        if not gate["passed"]:
            if not self.force:
                raise self._refusal(report, gate)
            gate = overruled(gate)
            self._warn_of_force(gate)
        self._write({**report, "gate": gate})
        return gate

    def _check_data(self, data_dir):
        from serving.data_gate import check_data

        return check_data(self.config, dataset.load_labels(data_dir), _label_counts(data_dir))

    def _refusal(self, report, gate):
        self._write({**report, "gate": gate})
        return GateRefused(
            f"not published: {'; '.join(gate['reasons'])}. The live version stays; see {self.run_dir / EVALUATION}."
        )

    def _warn_of_force(self, gate):
        self.console.warn(f"--force: going on although the gate refuses: {'; '.join(gate['reasons'])}")

    def _write(self, report):
        (self.run_dir / EVALUATION).parent.mkdir(exist_ok=True)
        write_json(self.run_dir / EVALUATION, report)

    def _test_rows(self):
        return dataset.load_texts(self.data_dir, "test"), dataset.Split.load(self.data_dir, "test").labels


def _label_counts(data_dir):
    return dataset.load_report(data_dir)["splits"]["train"]["labels"]
