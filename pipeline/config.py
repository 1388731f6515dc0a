"""The job file: one frozen, validated `JobConfig`; an unknown key or a bad value is refused by name."""

import difflib
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from pipeline.contract import JOB_NAME
from pipeline.errors import JobError
from pipeline.recipes import with_recipe

# Longest `model.max_length` whose full attention is computed in one piece: up to there that is faster, and its matrices
# fit beside the rest (benchmarks/NOTES.md). Above, in chunks, with memory that grows with the length.
CHUNKED_ABOVE = 1024
KEY_CHUNK = 512  # keys in a chunk, at most

_RECIPE_HINT = 'What the job does not set comes from training.recipe = "{}"; see pipeline/recipes.py.'

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


def _check_path(value):
    if value == "" or "\0" in value or isinstance(value, list) and not all(map(_check_path, value)):
        raise ValueError("must name a file or directory")
    return value


PathText = Annotated[str, pydantic.AfterValidator(_check_path)]
Files = Annotated[str | list[str], pydantic.AfterValidator(_check_path)]


class _Section(pydantic.BaseModel):
    # Strict: "3" is no number and 1 is no boolean, so that a slip in the file is seen and not guessed at.
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataConfig(_Section):
    train: Files  # file, list or glob; .csv .tsv .jsonl .parquet, .gz of the text forms
    validation: Files | Literal[""] = ""  # empty: validation_fraction of train, by content hash
    test: Files | Literal[""] = ""
    unlabelled: Files | Literal[""] = ""  # texts for pretraining, beside those of train; same forms and text_column
    text_column: str = "text"
    label_column: str = "label"
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.1
    allow_new_labels: bool = False  # the gate: labels that the live version does not have may be published

    @pydantic.model_validator(mode="after")
    def _check(self):
        if self.text_column == self.label_column:
            raise ValueError(
                "data.text_column and data.label_column must be two columns. "
                f"Received: text_column={self.text_column!r}, label_column={self.label_column!r}"
            )
        if not self.train:
            raise ValueError(f"data.train must name at least one file. Received: train={self.train!r}")
        for split in ("validation", "test"):
            fraction = getattr(self, f"{split}_fraction")
            if not getattr(self, split) and fraction == 0:
                raise ValueError(
                    f"data.{split}_fraction must be > 0 when data.{split} names no file. "
                    f"Received: {split}_fraction={fraction}"
                )
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                "data.validation_fraction + data.test_fraction must be < 1. Received: "
                f"validation_fraction={self.validation_fraction}, test_fraction={self.test_fraction}"
            )
        return self


class TokenizerConfig(_Section):
    vocab_size: Annotated[int, Field(ge=8, le=1_000_000)] = 8000
    hard_vocab_limit: bool = True  # false: where the corpus does not allow vocab_size, the nearest size that it allows
    case_folding: bool = False  # upper and lower case are the same
    model_file: PathText | Literal[""] = ""  # bring your own SentencePiece model

    @pydantic.model_validator(mode="after")
    def _check(self):
        if self.model_file and self.case_folding:
            raise ValueError(
                "tokenizer.case_folding is about training a tokenizer; that of tokenizer.model_file folds case or does "
                "not (SentencePiece's --normalization_rule_name=nmt_nfkc_cf): leave one of the two out. "
                f"Received: model_file={self.model_file!r}, case_folding=True"
            )
        return self


class ModelConfig(_Section):
    # The upper limits are far above what trains; they catch a slip before it asks for terabytes.
    d_model: Annotated[int, Field(ge=1, le=16_384)] = 256
    num_heads: Positive = 8
    d_ff: Annotated[int, Field(ge=1, le=65_536)] = 768
    num_layers: Annotated[int, Field(ge=1, le=256)] = 4
    dropout: Fraction = 0.1
    head_dropout: Fraction = 0.2
    max_length: Annotated[int, Field(ge=2, le=65_536)] = 256  # tokens; longer texts are cut at the end
    position: Literal["sinusoidal", "learned", "rope", "alibi", "none"] = "sinusoidal"
    pooling: Literal["mean", "max", "cls"] = "mean"  # cls: a learned vector in front of the tokens
    norm: Literal["pre", "post"] = "pre"
    activation: Literal["gelu", "relu", "swiglu"] = "gelu"
    num_kv_heads: Count = 0  # heads of keys and values, each shared by several of queries; 0: num_heads
    attention: Literal["full", "local", "local_global", "linear"] = "full"
    window: Annotated[int, Field(ge=1, le=65_536)] = 64  # of local attention: tokens on each side
    global_tokens: Annotated[int, Field(ge=1, le=65_536)] = 1  # of local_global: first tokens, seeing all and seen
    num_experts: Annotated[int, Field(ge=0, le=1024)] = 0  # 0: one feed-forward network for all tokens
    top_k: Positive = 2  # experts that each token goes to
    convolution: Annotated[int, Field(ge=0, le=255)] = 0  # tokens that one before the encoder layers spans; 0 = none
    # Models side by side, each trained by itself from other initial values; the mean of their logits counts.
    encoders: Annotated[int, Field(ge=1, le=16)] = 1
    # Pairs of neighbouring tokens that a linear model beside the encoder knows, at most; 0 = no such model.
    ngram_pairs: Annotated[int, Field(ge=0, le=1 << 24)] = 0

    @pydantic.model_validator(mode="after")
    def _check(self):
        if self.d_model % self.num_heads:
            raise ValueError(
                "model.d_model must be a multiple of model.num_heads. "
                f"Received: d_model={self.d_model}, num_heads={self.num_heads}"
            )
        if self.position in ("sinusoidal", "learned") and self.d_model % 2:
            raise ValueError(f"model.d_model must be even (sine and cosine pairs). Received: d_model={self.d_model}")
        if self.position == "rope" and self.d_model // self.num_heads % 2:
            raise ValueError(
                'model.position = "rope" turns pairs of values: model.d_model / model.num_heads must be even. '
                f"Received: d_model={self.d_model}, num_heads={self.num_heads}"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                "model.num_heads must be a multiple of model.num_kv_heads, or that be 0. "
                f"Received: num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )
        if self.attention == "linear" and self.position in ("rope", "alibi"):
            raise ValueError(
                'model.attention = "linear" computes no scores, which model.position = "rope" and "alibi" act on: use '
                f'"sinusoidal" or "learned". Received: position={self.position!r}'
            )
        if self.attention == "local" and self.pooling == "cls":
            raise ValueError(
                'model.pooling = "cls" needs a vector that sees the whole text; with model.attention = "local" it '
                f'sees {self.window} tokens: use "local_global". Received: attention="local", pooling="cls"'
            )
        if self.convolution and self.convolution % 2 == 0:
            raise ValueError(
                "model.convolution must be odd, as many tokens on each side, or 0. "
                f"Received: convolution={self.convolution}"
            )
        if self.num_experts == 1 or self.num_experts and self.top_k > self.num_experts:
            raise ValueError(
                "model.num_experts must be 0, or at least 2 and at least model.top_k. "
                f"Received: num_experts={self.num_experts}, top_k={self.top_k}"
            )
        return self

    @property
    def has_plain_attention(self):
        """True when it is scores, softmax and nothing else: what ONNX Runtime's own attention operator computes."""
        with_scores_alone = self.attention == "full" and self.position not in ("rope", "alibi")
        return with_scores_alone and self.num_kv_heads in (0, self.num_heads)


class TrainingConfig(_Section):
    recipe: Literal["reference", "small-data"] = "reference"  # values of keys that are not set; see pipeline/recipes.py
    epochs: Annotated[int, Field(ge=1, le=1000)] = 10
    batch_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 4096  # padded tokens in a batch
    batch_rows: Count = 0  # rows in a batch, at most; 0: as many as batch_tokens holds
    learning_rate: Annotated[float, Field(gt=0.0)] = 3e-4
    beta_2: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999  # AdamW: decay of the squared gradients' mean
    warmup_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1  # share of all steps
    weight_decay: Annotated[float, Field(ge=0.0)] = 1e-2
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    strategy: Literal["auto", "one", "mirrored", "multi_worker"] = "auto"  # devices that train together
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    checkpoint_every_s: Annotated[float, Field(gt=0.0)] = 300.0
    checkpoint_every_steps: Count = 0  # 0: by time and at each epoch's end only
    keep_checkpoints: Positive = 3
    patience: Count = 3  # evaluations without improvement; 0 = off
    subword_regularization: Fraction = 0.0  # chance that a piece is split in two, anew each epoch; 0 = off
    subword_sampling: Share = 0.0  # share of the texts whose segmentation is drawn anew each epoch; 0 = off
    subword_alpha: Annotated[float, Field(gt=0.0)] = 0.2  # of subword_sampling: the lower, the more evenly drawn
    token_dropout: Fraction = 0.0  # share of the tokens hidden behind <mask>, anew each epoch; 0 = off
    label_smoothing: Fraction = 0.0  # share of the target spread evenly over all classes
    teacher: Files | Literal[""] = ""  # finished run directories or .jsonl files of answers
    teacher_weight: Share = 0.5  # how much the teacher's answers count beside the labels
    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0.0)]] = "none"
    r_drop: Annotated[float, Field(ge=0.0)] = 0.0  # weight of the divergence between two passes; 0 = one pass
    ema_decay: Fraction = 0.0  # moving average of the weights, which is evaluated and exported; 0 = off
    accumulate_batches: Positive = 1  # batches that make one optimizer step
    recompute: bool = False  # forget activations in the forward pass, compute them again in the backward: less memory
    load_balancing: Annotated[float, Field(ge=0.0)] = 0.01  # weight of the loss that keeps all experts in use
    log_every_steps: Positive = 10

    @pydantic.field_validator("class_weights", mode="before")
    @classmethod
    def _class_weights(cls, value):
        if not isinstance(value, dict) and value not in ("none", "balanced"):
            raise ValueError('must be "none", "balanced" or a table of a number for each label, e.g. { bad = 2.0 }')
        return value

    @pydantic.model_validator(mode="after")
    def _check(self):
        if self.subword_regularization and self.subword_sampling:
            raise ValueError(
                "training.subword_regularization and training.subword_sampling are two ways to the same end: set one "
                f"of them to 0. Received: subword_regularization={self.subword_regularization}, "
                f"subword_sampling={self.subword_sampling}"
            )
        return self


class PretrainingConfig(_Section):
    epochs: Annotated[int, Field(ge=0, le=1000)] = 0  # of predicting masked tokens, before classification; 0 = off
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-4
    masked_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15  # of the tokens


class BaselineConfig(_Section):
    enabled: bool = True  # a linear model on TF-IDF of the same split is fitted, and compared with


class EvaluationConfig(_Section):
    metric: Literal["accuracy", "macro_f1", "loss"] = "accuracy"  # what "better" means
    min_value: float = 0.0  # the gate: publish nothing below (for loss: nothing above; 0 = off)
    max_regression: Annotated[float, Field(ge=0.0)] = 0.0  # allowed drop against the live version
    beat_baseline: bool = False  # the gate: publish nothing that is not better than the baseline
    max_label_shift: Share = 0.2  # allowed change of a label's share of the training rows, in points; 1 = off

    def is_better(self, value, other):
        """True when `value` of the chosen metric is strictly better than `other`."""
        return value < other if self.metric == "loss" else value > other


class ExportConfig(_Section):
    opset: Literal[20] = 20
    precisions: list[Literal["float32", "int8", "float16", "ort"]] = ["float32", "int8"]
    text_signature: bool = True  # needs TF-Text ops in the server

    @pydantic.model_validator(mode="after")
    def _check(self):
        if "float32" not in self.precisions:
            raise ValueError(
                "export.precisions must hold 'float32', the artifact the others are compared with. "
                f"Received: precisions={self.precisions}"
            )
        return self


class PublishConfig(_Section):
    base_path: PathText = "models"  # versions go to base_path/name/N
    keep_versions: Positive = 5


class JobConfig(_Section):
    """A whole job; sections are read-only and have been checked."""

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 17
    work_dir: PathText = "runs"
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    baseline: BaselineConfig = BaselineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()
    publish: PublishConfig = PublishConfig()

    @pydantic.model_validator(mode="after")
    def _check(self):
        model = self.model
        if "ort" in self.export.precisions and not (model.has_plain_attention and model.max_length <= CHUNKED_ABOVE):
            raise ValueError(
                'export.precisions may hold "ort" only with model.attention = "full", model.num_kv_heads = 0, another '
                f"model.position than rope and alibi, and model.max_length <= {CHUNKED_ABOVE}: leave it out. Received: "
                f"attention={model.attention!r}, num_kv_heads={model.num_kv_heads}, position={model.position!r}, "
                f"max_length={model.max_length}"
            )
        if self.evaluation.beat_baseline and not self.baseline.enabled:
            raise ValueError(
                "evaluation.beat_baseline needs a baseline to compare with: set baseline.enabled = true, or "
                f"beat_baseline = false. Received: beat_baseline=True, enabled={self.baseline.enabled}"
            )
        return self

    @pydantic.field_validator("name")
    @classmethod
    def _name(cls, name):
        if not JOB_NAME.fullmatch(name) or len(name) > 100:
            raise ValueError(f"name must match [a-z0-9-]+ and have at most 100 characters. Received: name={name!r}")
        return name

    @property
    def run_dir(self):
        """`work_dir/name`, where everything of this run lies."""
        return Path(self.work_dir) / self.name

    @property
    def model_dir(self):
        """`base_path/name`, where published versions lie."""
        return Path(self.publish.base_path) / self.name

    def resolved(self):
        """Returns the job with every default filled in, as plain JSON values."""
        return self.model_dump(mode="json")

    def portable(self):
        """Returns `resolved` with each absolute path cut to its last part, which tells nothing of this machine."""

        def cut(value):
            if isinstance(value, list):
                return [cut(path) for path in value]
            return Path(value).name if Path(value).is_absolute() else value

        job = self.resolved()
        job["work_dir"] = cut(job["work_dir"])
        data = "train", "validation", "test", "unlabelled"
        paths = {"data": data, "tokenizer": ("model_file",), "training": ("teacher",), "publish": ("base_path",)}
        for section, keys in paths.items():
            job[section] |= {key: cut(job[section][key]) for key in keys}
        return job


def load_job(path, overrides=()):
    """Reads a job file; what neither it nor an override sets comes from its recipe, and else is the default.

    Args:
        path: a TOML file.
        overrides: strings `section.key=value`, as given to `--set`; the last one wins.

    Returns:
        A `JobConfig`.

    Raises:
        JobError: the file cannot be read, a key is unknown or a value is out of its range.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise JobError(f"job file {path} is not valid TOML: {e}.") from e
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise JobError(f"cannot read job file {path}: {reason}. Give the path of a TOML job file.") from e
    for override in overrides:
        _apply_override(values, override)
    whole = with_recipe(values)
    try:
        return JobConfig.model_validate(whole)
    except pydantic.ValidationError as e:
        message = _describe(e.errors())
        by_recipe = [section for section in whole if whole[section] != values.get(section)]
        # Two keys that do not go together, of which the job need not have set both.
        if e.errors()[0]["type"] == "value_error" and any(f"{section}." in message for section in by_recipe):
            message += f" {_RECIPE_HINT.format(values['training']['recipe'])}"
        raise JobError(f"job file {path}: {message}") from e


def fingerprint(*values):
    """Returns the SHA-256 (hex) of JSON-serializable values; equal values give equal digests."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def differences(old, new, prefix=""):
    """Returns "key: old -> new" for every leaf where two nested dicts differ, sorted by key."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return found


def _apply_override(values, override):
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys) or override != override.encode("utf-8", "replace").decode():
        raise JobError(f"--set needs section.key=value. Received: {override!r}")
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise JobError(f"--set {path.strip()}: {key!r} is a value, not a section.")
    try:
        value = tomllib.loads("value = " + text)["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text.strip()  # a bare word, as in --set name=reviews
    if not isinstance(value, str) and _is_text(keys):
        value = text.strip()
    values[keys[-1]] = value


def _is_text(keys):
    """True when the key holds text, so that `--set data.label_column=2024` needs no quotes."""
    model = JobConfig
    for key in keys[:-1]:
        field = model.model_fields.get(key)
        if field is None or not _is_section(field.annotation):
            return False
        model = field.annotation
    field = model.model_fields.get(keys[-1])
    return field is not None and field.annotation is str


def _describe(errors):
    """One plain line for the first key with an error: the key, what it must be, what was received."""
    # A key of several types has an error for each of them; the one furthest inside is about the type that was meant.
    error = max((e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]), key=lambda e: len(e["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(error['loc'])!r}.{_nearest(error['loc'])}"
    # Names of keys only: pydantic adds list indices and the members of a union.
    keys = [k for k in error["loc"] if isinstance(k, str) and k.isidentifier() and k != "str"]
    key = ".".join(keys)
    if error["type"] == "missing":
        return f"key {key!r} is missing. Add it; the README lists every key with its meaning."
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        if "Received:" not in message:
            message = f"{key} {message}. Received: {keys[-1]}={error['input']!r}"
        return f"{message}."
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{key!r} must be a section [{key}]. Received: {key}={error['input']!r}."
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{key}: {message}. Received: {keys[-1]}={error['input']!r}."


def _nearest(keys):
    """The valid key that was probably meant, or all of them."""
    sections = {n: f.annotation for n, f in JobConfig.model_fields.items() if _is_section(f.annotation)}
    here, inside = keys[-1], keys[0] if len(keys) > 1 else ""
    elsewhere = [f"{n}.{here}" for n, s in sections.items() if here in s.model_fields]
    if elsewhere:
        return f" Did you mean {elsewhere[0]!r}?"
    valid = list((sections[inside] if inside else JobConfig).model_fields)
    close = difflib.get_close_matches(here, valid, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {'.'.join([*keys[:-1], close[0]])!r}?"
    return f" Valid keys{f' in [{inside}]' if inside else ''}: {', '.join(valid)}."


def _is_section(annotation):
    return isinstance(annotation, type) and issubclass(annotation, _Section)
