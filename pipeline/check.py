"""Before hours are spent: can this job learn? Each check has one purpose and says what it found and what to do.

They use what training uses: the job's data, sizes, precision, model, optimizer and compiled step. Nothing is saved.
"""

import contextlib
import dataclasses
import functools
import math
import re

import numpy as np
import tensorflow as tf

from pipeline import dataset
from pipeline.batches import epoch_plan, sequential_plan
from pipeline.classifier import build_classifier, compile_predict
from pipeline.contract import PAD_ID
from pipeline.errors import CheckFailed, JobError, PipelineError
from pipeline.evaluation import predict_logits, softmax
from pipeline.losses import class_weights
from pipeline.optimization import learning_rate
from pipeline.reading import join_some
from pipeline.seeds import derive_seed
from pipeline.train_step import TrainStep

_MAJORITY_SHARE = 0.99  # above, accuracy tells no model from the constant answer
_CONTRADICTED_SHARE = 0.05
_UNKNOWN_SHARE, _EMPTY_SHARE = 0.05, 0.01
_FIRST_LOSS_ROWS = 512
# The head's initial kernel gives each logit a standard deviation of 0.02 * sqrt(d_model), 0.64 for the largest models,
# nearly the same for every text: the loss is within some tenths of a nat.
_FIRST_LOSS_DISTANCE = 0.5
_PADDING_COLUMNS, _PADDING_LENGTH = (0, 5, 60), 128
# The shapes of the products change with the batch, and with them the order of their sums.
_PADDING_TOLERANCE = {"float32": 1e-5, "mixed_float16": 1e-2, "mixed_bfloat16": 5e-2}
_FEW_ROWS = 16
# 16 rows of 64 tokens: 300 steps of the reference model are a minute on two cores.
_OVERFIT_LENGTH, _OVERFIT_STEPS, _OVERFIT_LOSS = 64, 300, 0.05
_MEASURE_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Result:
    """What one check found: its name, whether it passed, and one line of figures, meaning and remedy."""

    name: str
    ok: bool
    line: str


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """What is checked: a job and its prepared training split."""

    config: object
    split: dataset.Split
    labels: list
    report: dict

    @classmethod
    def load(cls, config, data_dir):
        """Opens `data_dir`, made by `pipeline.dataset.prepare`, for a `JobConfig`."""
        report, labels = dataset.load_report(data_dir), dataset.load_labels(data_dir)
        return cls(config, dataset.Split.load(data_dir, "train"), labels, report)

    def build(self, model_config):
        """Returns the job's model, untrained, with the sizes of a `ModelConfig`; of several encoders one."""
        training = self.config.training
        return build_classifier(
            model_config.model_copy(update={"encoders": 1}),
            self.report["vocab_size"],
            len(self.labels),
            seed=self.config.seed,
            dtype=training.precision,
            recompute=training.recompute,
        )

    @functools.cached_property
    def model(self):
        """The model that training starts with; no check leaves it changed."""
        return self.build(self.config.model)

    @functools.cached_property
    def predict(self):
        """`model`, compiled, without dropout."""
        return compile_predict(self.model)

    def some_rows(self, count):
        """Returns the indices of up to `count` rows, the same ones each time: int64, shuffled."""
        rng = np.random.Generator(np.random.PCG64(derive_seed(self.config.seed, "check")))
        return rng.permutation(len(self.split))[:count]

    def different_rows(self, count, length):
        """Returns up to `count` rows, the classes in turn; their first `length` tokens are not empty, and not equal."""
        rows = self.some_rows(len(self.split))
        labels = self.split.labels[rows]
        by_class = np.argsort(labels, kind="stable")
        turn = np.empty(len(rows), np.int64)  # a row's place among those of its class
        turn[by_class] = np.arange(len(rows)) - np.searchsorted(labels[by_class], labels[by_class])
        chosen = {b"": -1}
        for row in rows[np.argsort(turn, kind="stable")]:
            chosen.setdefault(self._tokens(row, length), row)
            if len(chosen) > count:
                break
        return np.array(list(chosen.values())[1:], np.int64)

    def contradicted_share(self):
        """Returns the share of rows whose tokens occur under another label too."""
        keys = [self._tokens(row) for row in range(len(self.split))]
        seen = {}
        for key, label in zip(keys, self.split.labels.tolist(), strict=True):
            seen.setdefault(key, set()).add(label)
        return sum(len(seen[key]) > 1 for key in keys) / len(keys)

    def _tokens(self, row, length=None):
        start, end = self.split.offsets[row : row + 2]
        return self.split.tokens[start:end][:length].tobytes()


def check(subject, console, stop=lambda: None):
    """Runs every check, also after one failed, and prints a line for each.

    Args:
        subject: a `Subject`.
        console: prints the lines; see `pipeline.console`.
        stop: called after each check; may raise to end early.

    Raises:
        CheckFailed: names the checks that failed.
    """
    failed, error = [], None
    for name, function in CHECKS.items():
        try:
            result = function(subject)
        except PipelineError:
            raise
        except Exception as e:
            stop()  # the error may be what became of a signal
            error, reason = e, " ".join(str(e).split())[:300]
            result = Result(name, False, f"{type(e).__name__}: {reason}. --debug shows the traceback.")
        console.result(f"{'ok' if result.ok else 'FAILED':6}  {name}: {result.line}")
        failed += [] if result.ok else [name]
        stop()
    if failed:
        raise CheckFailed(
            f"{len(failed)} of {len(CHECKS)} checks failed: {', '.join(failed)}. Their lines say what to do."
        ) from error
    console.result(f"all {len(CHECKS)} checks passed")


def check_labels(subject):
    """Every class has rows, none has nearly all, and equal texts have equal labels."""
    split, labels = subject.split, subject.labels
    counts = np.bincount(split.labels, minlength=len(labels))
    majority, share = labels[counts.argmax()], counts.max() / len(split)
    contradicted = subject.contradicted_share()
    line = (
        f"{len(labels)} classes of {counts.min()} to {counts.max()} training rows; always answering {majority!r} is "
        f"right in {share:.1%}, the accuracy to beat; {contradicted:.1%} of the rows occur under another label too"
    )
    problems = []
    if absent := [label for label, n in zip(labels, counts, strict=True) if n == 0]:
        problems.append(
            f"classes without a training row: {join_some(absent)}; the live version has them, and the gate refuses to "
            "lose them: add rows, or publish with --force"
        )
    if len(labels) < 2:
        problems.append("a single class leaves nothing to learn; see data.label_column")
    elif share > _MAJORITY_SHARE and subject.config.evaluation.metric == "accuracy":
        problems.append(
            f'over {_MAJORITY_SHARE:.0%} in one class: see data.label_column, or set evaluation.metric = "macro_f1"'
        )
    try:
        class_weights(subject.config.training.class_weights, labels, counts)
    except JobError as e:
        problems.append(str(e).rstrip("."))
    if contradicted > _CONTRADICTED_SHARE:
        problems.append(
            f"over {_CONTRADICTED_SHARE:.0%} contradict each other: see data.text_column and data.label_column, and "
            "whether model.max_length cuts off what tells them apart"
        )
    return _result("labels", line, problems)


def check_tokenizer(subject):
    """The tokens say what the texts say: few are unknown, few texts are empty; and how many are cut."""
    figures, lengths = subject.report["splits"]["train"], subject.split.lengths
    unknown, truncated = figures["unknown_share"], figures["truncated_share"]  # to be cut can be wise: no failure
    empty = float((lengths == 0).mean())
    max_length = subject.config.model.max_length
    line = (
        f"{unknown:.2%} of the tokens are unknown; of the texts {truncated:.1%} are longer than "
        f"model.max_length={max_length} and {empty:.2%} empty; median {figures['length']['p50']} tokens"
    )
    problems = []
    if unknown > _UNKNOWN_SHARE:
        problems.append(f"over {_UNKNOWN_SHARE:.0%} unknown: tokenizer.model_file was made for other text")
    if empty > _EMPTY_SHARE:
        problems.append(f"over {_EMPTY_SHARE:.0%} are empty: see data.text_column")
    return _result("tokenizer", line, problems)


def check_batches(subject):
    """An epoch holds every row exactly once."""
    training, lengths = subject.config.training, subject.split.lengths
    plan = epoch_plan(lengths, training.batch_tokens, subject.config.seed, 0, training.batch_rows)
    times = np.bincount(np.concatenate(plan), minlength=len(lengths))
    padded = sum(len(rows) * max(1, int(lengths[rows].max())) for rows in plan)
    line = (
        f"{len(plan)} in an epoch for {len(lengths)} rows, {len(lengths) / len(plan):.0f} rows in a batch, "
        f"{1 - lengths.sum() / padded:.1%} padding"
    )
    problems = []
    if len(times) != len(lengths) or (times != 1).any():
        problems.append(f"{(times != 1).sum()} rows are not in it exactly once: pipeline.batches.epoch_plan is wrong")
    return _result("batches", line, problems)


def check_first_loss(subject):
    """An untrained model knows nothing: its loss is near ln C."""
    split, num_classes = subject.split, len(subject.labels)
    rows = np.sort(subject.some_rows(_FIRST_LOSS_ROWS))
    plan = [rows[batch] for batch in sequential_plan(split.lengths[rows], subject.config.training.batch_tokens)]
    loss = _losses(predict_logits(subject.predict, split, plan)[rows], split.labels[rows])
    # The mean of the classes' means: else the bias of an untrained head would count as often as the largest class does.
    of_class = [loss[split.labels[rows] == label].mean() for label in np.unique(split.labels[rows])]
    found, expected = float(np.mean(of_class)), math.log(num_classes)
    shares = np.bincount(split.labels, minlength=num_classes) / len(split)
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    line = (
        f"{found:.3f} nats over {len(rows)} rows, each class weighing the same; ln {num_classes} is {expected:.3f}; "
        f"always answering with the classes' shares costs {entropy:.3f}, the loss to beat"
    )
    problems = []
    if not math.isfinite(found):
        problems.append("not finite: use another training.precision, or look for the layer that overflows")
    elif abs(found - expected) > _FIRST_LOSS_DISTANCE:
        problems.append(
            f"not within {_FIRST_LOSS_DISTANCE} of ln C: the initial weights are too large, or a "
            "normalization is missing, in the layers before the logits"
        )
    return _result("first loss", line, problems)


def check_gradients(subject):
    """Every trainable variable, and every embedding row that the batch uses, gets a gradient."""
    model, split = subject.model, subject.split
    longest = max(1, int(split.lengths.max()))
    count = np.clip(subject.config.training.batch_tokens // longest - 2, 1, _FEW_ROWS)
    rows = subject.different_rows(count, longest)
    rows = np.append(rows, [split.lengths.argmin(), split.lengths.argmax()])
    token_ids = split.token_ids(rows)
    gradients = _gradients(model, token_ids, split.labels[rows], subject.config.training.precision)
    used = np.setdiff1d(token_ids, PAD_ID)
    missing, not_finite = [], []
    names = [variable.path.partition("/")[2] for variable in model.trainable_variables]  # without the model's
    idle = _idle_experts(names, gradients)
    for name, variable, gradient in zip(names, model.trainable_variables, gradients, strict=True):
        if gradient is None or not gradient.any():
            # The true gradient of a key's bias is 0: softmax does not see what is added to all keys.
            missing += [] if name.endswith("attention/key/bias") or _expert_of(name) in idle else [name]
        elif not np.isfinite(gradient).all():
            not_finite.append(name)
        elif _is_embedding(variable) and (without := int((~gradient[used].any(axis=1)).sum())):
            missing.append(f"{name} ({without} of the batch's {len(used)} tokens)")
    line = f"{len(gradients)} variables, {token_ids.shape[0]} rows of up to {token_ids.shape[1]} tokens, dropout as set"
    if idle:
        line += f"; {len(idle)} experts got none of these tokens"
    problems = []
    if missing:
        problems.append(f"no gradient reaches {_listed(missing)}: they will never learn; look for what cuts them off")
    if not_finite:
        problems.append(f"not finite for {_listed(not_finite)}: use another training.precision")
    return _result("gradients", line, problems)


def check_padding(subject):
    """A text's logits depend neither on padding nor on its batch mates."""
    max_length = subject.config.model.max_length
    length = min(_PADDING_LENGTH, max(1, max_length - max(_PADDING_COLUMNS), max_length // 2))  # room for padding
    rows = subject.different_rows(_FEW_ROWS, length)
    token_ids = subject.split.token_ids(rows)[:, :length]
    token_ids = np.pad(token_ids, ((0, 1), (0, 0)), constant_values=PAD_ID)  # and an empty text
    alone = [subject.predict(row[None, : max(1, np.count_nonzero(row))]) for row in token_ids]
    expected = np.concatenate(alone)  # [B, C]
    found = {}
    for columns in _PADDING_COLUMNS:
        columns = min(columns, max_length - token_ids.shape[1])
        padded = np.pad(token_ids, ((0, 0), (0, columns)), constant_values=PAD_ID)
        found[f"{columns} more columns of padding"] = subject.predict(padded)
    found["other batch mates"] = np.concatenate(
        [subject.predict(token_ids[i : i + 8]) for i in range(0, len(token_ids), 8)]
    )
    with _other_padding_vector(subject.model):
        found["another embedding of PAD"] = subject.predict(padded)
    off = {name: float(np.abs(logits - expected).max()) for name, logits in found.items()}
    tolerance = _PADDING_TOLERANCE[subject.config.training.precision]
    line = (
        f"padding and batch mates move the logits of {len(token_ids)} texts by {max(off.values()):.1e} at most; "
        f"{tolerance:.0e} is allowed"
    )
    leaks = [f"{name} ({value:.1e})" for name, value in off.items() if not value <= tolerance]
    problems = [f"they move with {', '.join(leaks)}: a layer ignores the mask"] if leaks else []
    return _result("padding", line, problems)


def check_overfitting(subject):
    """The compiled training step brings one small batch to nearly no loss, dropout off."""
    config = subject.config
    rows = subject.different_rows(_FEW_ROWS, _OVERFIT_LENGTH)
    labels = subject.split.labels[rows]
    if len(np.unique(labels)) < 2:
        problem = "all texts are the same to the model, or of one class: see data.text_column and data.label_column"
        return _result("overfitting", f"{len(rows)} different texts of {len(np.unique(labels))} classes", [problem])
    token_ids = subject.split.token_ids(rows)[:, :_OVERFIT_LENGTH]
    model = subject.build(config.model.model_copy(update={"dropout": 0.0, "head_dropout": 0.0}))
    curve, right = _overfit(model, config.training, token_ids, labels)
    step, last = list(curve.items())[-1]
    shown = [list(curve.items())[i] for i in np.unique(np.linspace(0, len(curve) - 1, 6).astype(int))]
    line = (
        f"{len(rows)} rows of {len(np.unique(labels))} classes, {right:.0%} right after {step} steps; loss "
        + ", ".join(f"{loss:.3f} at {at}" for at, loss in shown)
    )
    reached = right == 1.0 and last < _OVERFIT_LOSS
    return _result("overfitting", line, [] if reached else [_why_not_overfitted(curve, config.training.learning_rate)])


CHECKS = {
    "labels": check_labels,
    "tokenizer": check_tokenizer,
    "batches": check_batches,
    "first loss": check_first_loss,
    "gradients": check_gradients,
    "padding": check_padding,
    "overfitting": check_overfitting,
}


def _result(name, line, problems):
    why = f" Why: {'; '.join(problems)}." if problems else ""
    return Result(name, not problems, f"{line}.{why}")


def _listed(names):
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _losses(logits, labels):
    """Returns float64 [N]: the negative log-likelihood of each right label, in nats."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.log(softmax(logits)[np.arange(len(labels)), labels])


def _gradients(model, token_ids, labels, precision):
    """Returns the gradient of each trainable variable as an array, None where there is none."""
    # Small float16 gradients vanish without the loss scale that training finds by itself.
    scale = 1024.0 if precision == "mixed_float16" else 1.0

    @tf.function
    def gradients_of(token_ids, labels):
        with tf.GradientTape() as tape:
            logits = model(token_ids, training=True)
            loss = scale * tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return [None if g is None else tf.convert_to_tensor(g) for g in found]  # embeddings: dense [V, D]

    return [None if g is None else g.numpy() for g in gradients_of(tf.constant(token_ids), tf.constant(labels))]


def _expert_of(name):
    """Returns the path of the expert that a variable belongs to, "" where it belongs to none."""
    match = re.match(r".*/expert_\d+(?=/)", name)
    return match[0] if match else ""


def _idle_experts(names, gradients):
    """Returns the paths of experts without a token: no variable has a gradient, though the layer's other experts learn.

    A zero gradient, that is. Where there is none at all, the expert is cut off.
    """
    experts = {_expert_of(name) for name in names} - {""}
    arrived = zip(names, gradients, strict=True)
    busy = {_expert_of(name) for name, gradient in arrived if gradient is None or gradient.any()} - {""}
    layers = {expert.rpartition("/")[0] for expert in busy}
    return {expert for expert in experts - busy if expert.rpartition("/")[0] in layers}


def _is_embedding(variable):
    return variable.path.endswith("embeddings")


@contextlib.contextmanager
def _other_padding_vector(model):
    """Gives PAD another embedding inside the block."""
    tables = [(v, v.numpy()) for v in model.trainable_variables if _is_embedding(v)]
    for variable, table in tables:
        changed = table.copy()
        changed[PAD_ID] = np.linspace(-10.0, 10.0, table.shape[1])  # a constant would vanish in LayerNorm
        variable.assign(changed)
    try:
        yield
    finally:
        for variable, table in tables:
            variable.assign(table)


def _overfit(model, training, token_ids, labels):
    """Trains on one batch; returns ({step: loss}, share of right answers at the last of them)."""
    # Smoothing, a teacher and R-Drop keep the loss away from 0.
    plain = {"label_smoothing": 0.0, "teacher": "", "r_drop": 0.0, "ema_decay": 0.0, "accumulate_batches": 1}
    train_step = TrainStep(model, training.model_copy(update=plain), np.ones(model.head.units))
    predict = compile_predict(model)

    def measure():
        logits = np.asarray(predict(token_ids))
        return float(_losses(logits, labels).mean()), float((logits.argmax(axis=1) == labels).mean())

    loss, right = measure()
    curve = {0: loss}
    for step in range(1, _OVERFIT_STEPS + 1):
        rate = learning_rate(step - 1, _OVERFIT_STEPS, training.learning_rate, training.warmup_ratio)
        train_step([(token_ids, labels)], rate)
        if step % _MEASURE_EVERY == 0:
            curve[step], right = measure()
            if not math.isfinite(curve[step]) or right == 1.0 and curve[step] < _OVERFIT_LOSS:
                break
    return curve, right


def _why_not_overfitted(curve, rate):
    first, *_, last = curve.values()
    aim = f"under {_OVERFIT_LOSS} and 100% were to be reached in {_OVERFIT_STEPS} steps"
    if not math.isfinite(last) or last > 1.05 * first or last > 2 * min(curve.values()):
        return f"{aim}: training.learning_rate={rate:g} is too high, try a tenth of it"
    if last > 0.9 * first:
        return f"{aim}: training.learning_rate={rate:g} is far too low, or the text does not reach the logits"
    return f"{aim}, the loss falls too slowly: training.learning_rate={rate:g} is too low or weight_decay too high"
