"""Every error a user can meet, each with the exit code the command line ends with."""


class PipelineError(Exception):
    """Base of all expected failures; the message is one plain line: what, where, what to do."""

    exit_code = 1


class JobError(PipelineError):
    """The job file, an override or the usage is wrong."""

    exit_code = 2


class DataError(PipelineError):
    """The data cannot be used as it is."""

    exit_code = 3


class GateRefused(PipelineError):
    """A model, or the data it is or would be trained on, is not good enough to be published."""

    exit_code = 4


class LockHeld(PipelineError):
    """Another process is working on the same run or the same served model."""

    exit_code = 5


class Interrupted(PipelineError):
    """SIGTERM or SIGINT arrived; everything needed to go on was saved."""

    exit_code = 75


class CheckpointError(PipelineError):
    """A checkpoint cannot be written or read."""


class TrainingError(PipelineError):
    """Training cannot go on, e.g. the loss is not finite."""


class VerificationError(PipelineError):
    """A reloaded artifact does not answer as the trained model does."""


class ArtifactError(PipelineError):
    """A version directory is incomplete, damaged or of another format."""


class CheckFailed(PipelineError):
    """`check` found that this job cannot learn as it is."""


class ServingError(PipelineError):
    """TensorFlow Serving refused a request or did not answer it.

    Attributes:
        code: the status, as gRPC names it, e.g. "NOT_FOUND"; "NOT_FINITE" for an answer that holds NaN.
        server_message: what the server said, as it came.
    """

    def __init__(self, message, code, server_message=""):
        super().__init__(message)
        self.code = code
        self.server_message = server_message
