"""From labelled files to token arrays on disk: read, split, check, tokenise, report; and the reader of the result."""

import collections
import contextlib
import dataclasses
import functools
import json
from pathlib import Path

import numpy as np

from pipeline.config import fingerprint
from pipeline.contract import MASK, PAD_ID, TOKENIZER_MODEL, UNK_ID, list_files, sha256_file
from pipeline.errors import DataError, JobError
from pipeline.files import read_json, staged_directory, write_json
from pipeline.reading import file_form, find_files, join_some, read_table
from pipeline.splitting import SPLITS, check_splits, choose_unlabelled, describe_duplicates, split_rows
from pipeline.text import Tokenizer, train_tokenizer

LABELS = "labels.json"
REPORT = "report.json"
UNLABELLED = "unlabelled"
TEXTS = "texts.jsonl"

_FORMAT = 2  # part of the fingerprint: what was written in another way is prepared again
_FEW_ROWS = 10  # a class with fewer training rows gets a warning
_ENCODE_ROWS = 8192


def read_rows(pattern, text_column, label_column, require_labels=True):
    """Returns (texts, labels) of the files that `pattern` names; arguments and errors as in `read_table`."""
    rows = read_table(pattern, text_column, label_column, require_labels)
    return rows.texts, rows.labels


def data_fingerprint(job, report=None):
    """Returns a SHA-256 (hex) over the contents of the input files and the settings that shape the data.

    Args:
        job: a `JobConfig`.
        report: what `prepare` returned: its record of the input files and the tokenizer counts, none is opened.

    Raises:
        DataError: an input file is missing or cannot be read.
        JobError: `tokenizer.model_file` cannot be used.
    """
    data = job.data.model_dump(mode="json", exclude={"allow_new_labels"})  # that is a matter of the gate
    for name, files in _input_files(job).items():
        if report is None:
            contents = [(path, sha256_file(path)) for path in (find_files(files) if files else [])]
        else:
            contents = [(path, content["sha256"]) for path, content in report["inputs"].get(name, {}).items()]
        data[name] = [(file_form(path), digest) for path, digest in contents]
    tokenizer = job.tokenizer.model_dump(exclude={"model_file"}), _needs_mask(job)
    if job.tokenizer.model_file:
        tokenizer = _load_tokenizer(job).sha256 if report is None else report["tokenizer_sha256"]
    return fingerprint(_FORMAT, data, tokenizer, job.model.max_length)


def prepare(job, data_dir, first_labels=()):
    """Makes `data_dir` from the job's input files; does nothing when it was made from equal ones.

    Writes `tokenizer.model`, `labels.json` (in the order of `order_labels`), `report.json` and per split `tokens.npy`
    (int32, flat, rows cut at `model.max_length`), `offsets.npy` (int64 `[rows + 1]`), `labels.npy` (int32 `[rows]`),
    `rows.npy` (int64 `[rows]`, the row's number in its source) and `texts.jsonl` (a JSON string per row). What
    pretraining reads besides lies in `unlabelled/`, without texts; its labels are -1.

    Args:
        job: a `JobConfig`.
        data_dir: becomes complete in one rename, or stays as it was.
        first_labels: labels that have their index already, whether or not there are rows of them.

    Returns:
        The report, as in `report.json`.

    Raises:
        DataError: the files, the labels or a split cannot be used.
        JobError: the tokenizer's settings do not suit the data.
    """
    data_dir, key = Path(data_dir), data_fingerprint(job)
    stored = prepared(data_dir, key)
    if stored is not None and _is_in_order(stored, first_labels):
        return stored
    data = job.data
    sources = {name: _read(job, name, files) for name, files in _input_files(job).items() if files}
    splits, removed = split_rows(
        {s: sources[s] for s in SPLITS if s in sources}, data.validation_fraction, data.test_fraction
    )
    check_splits(sources, splits, first_labels)
    unlabelled = choose_unlabelled(sources[UNLABELLED], splits) if UNLABELLED in sources else ()
    labels = order_labels(first_labels, splits["train"].labels)
    tokenizer = _tokenizer(job, splits["train"].texts)
    report = {
        "fingerprint": key,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "max_length": job.model.max_length,
        "sources": {name: _describe_source(source) for name, source in sources.items()},
        "inputs": {name: _describe_inputs(source) for name, source in sources.items()},
        "duplicates": describe_duplicates(splits, removed),
    }
    with staged_directory(data_dir) as staged:
        (staged / TOKENIZER_MODEL).write_bytes(tokenizer.model)
        write_json(staged / LABELS, labels)
        report["splits"] = {
            name: _write_split(staged / name, split, labels, tokenizer, job.model.max_length)
            for name, split in splits.items()
        }
        if unlabelled:
            rows, removed = unlabelled
            figures = _write_rows(staged / UNLABELLED, rows, [-1] * len(rows.texts), tokenizer, job.model.max_length)
            report[UNLABELLED] = {**figures, "removed": removed}
        report["warnings"] = _warnings(job, report)
        report["files"] = list_files(staged)
        write_json(staged / REPORT, report)
        if data_fingerprint(job) != key:
            raise DataError("the input files changed while they were read. Run it again when they are complete.")
    return report


def prepared(data_dir, key):
    """Returns the report of a `data_dir` that was made from inputs of fingerprint `key` and is whole, else None."""
    data_dir = Path(data_dir)
    report = read_json(data_dir / REPORT)
    if not isinstance(report, dict) or report.get("fingerprint") != key:
        return None
    files = list_files(data_dir)
    files.pop(REPORT)
    return report if files == report.get("files") else None


def order_labels(first_labels, found):
    """Returns the labels in index order: those that have an index already keep it, the others follow sorted."""
    return [*first_labels, *sorted(set(found) - set(first_labels))]


def _input_files(job):
    """Returns name -> the setting that names files, "" for none; what this job has no use for is left alone."""
    files = {name: getattr(job.data, name) for name in SPLITS}
    return {**files, UNLABELLED: job.data.unlabelled if job.pretraining.epochs else ""}


def _read(job, name, files):
    return read_table(files, job.data.text_column, job.data.label_column, require_labels=name != UNLABELLED)


def _is_in_order(report, first_labels):
    labels = report["splits"]["train"]["labels"]
    found = [label for label in labels if any(split["labels"][label] for split in report["splits"].values())]
    return list(labels) == order_labels(first_labels, found)


def _tokenizer(job, texts):
    if job.tokenizer.model_file:
        return _load_tokenizer(job)
    settings = job.tokenizer.model_dump(exclude={"model_file"})
    return Tokenizer(train_tokenizer(texts, **settings, mask=_needs_mask(job)))


def _needs_mask(job):
    return job.training.token_dropout > 0 or job.pretraining.epochs > 0


def _load_tokenizer(job):
    """Returns the user's own tokenizer; refuses one that cannot do what the training asks of it."""
    path = job.tokenizer.model_file
    tokenizer = Tokenizer.load(path)
    if job.training.subword_sampling and not tokenizer.can_sample:
        raise JobError(
            f"tokenizer.model_file={path} has one way to spell a text, so none can be drawn. Give a unigram or BPE "
            f"model, or set training.subword_sampling to 0. Received: {job.training.subword_sampling}"
        )
    if _needs_mask(job) and tokenizer.mask_id < 0:
        raise JobError(
            f"tokenizer.model_file={path} has no control symbol {MASK} to put in the place of tokens. Train it with "
            f"--control_symbols={MASK}, or set training.token_dropout and pretraining.epochs to 0. Received: "
            f"token_dropout={job.training.token_dropout}, epochs={job.pretraining.epochs}"
        )
    return tokenizer


def _write_split(directory, split, labels, tokenizer, max_length):
    """Writes the files of one split and returns its part of the report."""
    index = {label: i for i, label in enumerate(labels)}
    figures = _write_rows(directory, split, [index[label] for label in split.labels], tokenizer, max_length)
    with open(directory / TEXTS, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(text) + "\n" for text in split.texts)
    rows, counts = len(split.texts), collections.Counter(split.labels)
    return {
        "rows": rows,
        "source": f"data.{split.source}",
        "labels": {label: counts[label] for label in labels},
        "shares": {label: round(counts[label] / rows, 6) for label in labels},
        **figures,
    }


def _write_rows(directory, rows, label_indices, tokenizer, max_length):
    """Writes the arrays of one `Split` and returns figures about its tokens."""
    directory.mkdir()
    tokens, lengths, unknown = _encode(tokenizer, rows.texts, max_length)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.minimum(lengths, max_length), out=offsets[1:])
    np.save(directory / "tokens.npy", tokens)
    np.save(directory / "offsets.npy", offsets)
    np.save(directory / "labels.npy", np.array(label_indices, np.int32))
    np.save(directory / "rows.npy", rows.numbers)
    percentiles = {f"p{q}": int(np.percentile(lengths, q, method="higher")) for q in (50, 90, 95, 99)}
    return {
        "rows": len(lengths),
        "length": percentiles | {"max": int(lengths.max()), "mean": round(float(lengths.mean()), 2)},
        "tokens": len(tokens),
        "truncated_share": round(float((lengths > max_length).mean()), 6),
        "unknown_share": round(unknown / max(1, int(lengths.sum())), 6),
    }


def _encode(tokenizer, texts, max_length):
    """Returns the tokens (int32, flat, cut), the lengths before the cut (int64 `[rows]`) and the number of UNKs."""
    tokens, lengths, unknown = [], [], 0
    for start in range(0, len(texts), _ENCODE_ROWS):
        rows = tokenizer.encode(texts[start : start + _ENCODE_ROWS])
        lengths += map(len, rows)
        unknown += int((np.concatenate(rows) == UNK_ID).sum())
        tokens.append(np.concatenate([row[:max_length] for row in rows]))
    return np.concatenate(tokens), np.array(lengths, np.int64), unknown


def _describe_source(source):
    read = len(source.texts) + source.blank
    return {"files": [path for path, _ in source.files], "rows": read, "blank": source.blank}


def _describe_inputs(source):
    ends = [first for _, first in source.files[1:]] + [len(source.texts) + source.blank]
    return {
        path: {"sha256": sha256_file(path), "rows": end - first}
        for (path, first), end in zip(source.files, ends, strict=True)
    }


def changed_inputs(job, report):
    """Names the input files whose content is not the one that data was made from.

    Args:
        job: a `JobConfig`; its files may have moved, or be read in another way.
        report: what `prepare` returned for the earlier content.

    Returns:
        One str per file: key, path, both SHA-256 (their beginnings) and numbers of rows.
    """
    changed = []
    for name, files in _input_files(job).items():
        stored = report.get("inputs", {}).get(name, {})
        current = {path: {"sha256": sha256_file(path)} for path in (find_files(files) if files else [])}
        kept = {i["sha256"] for i in stored.values()} & {i["sha256"] for i in current.values()}
        paths = [p for i in (stored, current) for p, content in i.items() if content["sha256"] not in kept]
        if paths and files:
            with contextlib.suppress(DataError):  # the rows are a courtesy; data that cannot be read has its own error
                current = _describe_inputs(_read(job, name, files))
        for path in dict.fromkeys(paths):
            old, new = _describe_content(stored.get(path)), _describe_content(current.get(path))
            changed.append(f"data.{name}: {path}: {old} -> {new}")
    return changed


def _describe_content(content):
    if content is None:
        return "not there"
    rows = f" ({content['rows']} rows)" if "rows" in content else ""
    return f"sha256 {content['sha256'][:12]}{rows}"


def _warnings(job, report):
    splits, found = report["splits"], []
    asked, pieces = job.tokenizer.vocab_size, report["vocab_size"]
    if not job.tokenizer.model_file and pieces != asked:
        reason = "allows no more" if pieces < asked else "needs that many for its characters"
        found.append(f"the vocabulary has {pieces} pieces, not tokenizer.vocab_size={asked}: this corpus {reason}")
    few = [label for label, n in splits["train"]["labels"].items() if 0 < n < _FEW_ROWS]
    if few:
        found.append(f"classes with fewer than {_FEW_ROWS} training rows: {join_some(few)}")
    for name in SPLITS:
        absent = [label for label, n in splits[name]["labels"].items() if n == 0]
        if absent:
            found.append(f"classes without a {name} row: {join_some(absent)}")
    for pair, count in report["duplicates"]["removed"].items():
        name, other = pair.split("_in_")
        if count:
            found.append(f"{count} {name} rows were removed because their text is in the {other} split")
    for name, source in report["sources"].items():
        if source["blank"] > 0.01 * source["rows"]:
            found.append(f"{source['blank']} of {source['rows']} rows of data.{name} have no text and were left out")
    if several := report["duplicates"]["train_texts_with_several_labels"]:
        found.append(f"{several} training texts occur under more than one label")
    if (share := splits["train"]["truncated_share"]) > 0.05:
        found.append(f"{share:.0%} of the training texts are longer than model.max_length={job.model.max_length}")
    if (share := splits["train"]["unknown_share"]) > 0.01:
        found.append(f"{share:.1%} of the training tokens are unknown to the tokenizer")
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """One split on disk.

    Attributes:
        tokens: int32, flat, memory-mapped.
        offsets: int64 `[rows + 1]`; row i is `tokens[offsets[i]:offsets[i + 1]]`.
        labels: int32 `[rows]`, indices into `load_labels`; -1 for unlabelled rows.
        rows: int64 `[rows]`, the row's number in its source, blank rows and all files counted, from 0.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    rows: np.ndarray

    @classmethod
    def load(cls, data_dir, name):
        """Opens the split `name` ("train", "validation", "test", or UNLABELLED) of a directory that `prepare` made.

        Raises:
            DataError: it is not there, or damaged.
        """
        directory = Path(data_dir) / name
        try:
            mapped = np.load(directory / "tokens.npy", mmap_mode="r")
            arrays = [np.load(directory / f"{array}.npy") for array in ("offsets", "labels", "rows")]
        except (OSError, ValueError, EOFError) as e:
            raise _unprepared(directory, e) from e
        return cls(mapped.view(np.ndarray), *arrays)  # a plain view of the map: np.memmap indexes slowly

    def __len__(self):
        return len(self.labels)

    @functools.cached_property
    def lengths(self):
        """int64 `[rows]`: tokens per row."""
        return np.diff(self.offsets)

    def token_ids(self, indices):
        """Returns int32 `[B, T]`: the rows at `indices` padded at the end; T is `padded_length` of the longest of them,
        though no more than the longest row of the split has."""
        indices = np.asarray(indices, np.int64)
        lengths = self.lengths[indices][:, None]  # [B, 1]
        most = min(padded_length(lengths.max(initial=0)), self.lengths.max(initial=0))
        position = np.arange(max(1, most))  # [T]
        real = position < lengths  # [B, T]
        token_ids = np.full(real.shape, PAD_ID, np.int32)
        token_ids[real] = self.tokens[(self.offsets[indices][:, None] + position)[real]]
        return token_ids


def padded_length(length):
    """Returns the length that rows of up to `length` tokens are padded to: 16 steps between powers of two, at least 1.

    So that the batches of a training have some fifty shapes, not hundreds; it costs 1 % of padding.
    """
    step = max(1, 1 << max(0, int(length).bit_length() - 5))
    return max(1, -(-int(length) // step) * step)


def load_labels(data_dir):
    """Returns the label strings in index order. Raises DataError where `prepare` has not been."""
    return _load_json(Path(data_dir) / LABELS)


def load_report(data_dir):
    """Returns what `prepare` returned. Raises DataError where `prepare` has not been."""
    return _load_json(Path(data_dir) / REPORT)


def load_texts(data_dir, name):
    """Returns the texts of a split in the order of its rows. Raises DataError where `prepare` has not been."""
    return list(iterate_texts(data_dir, name))


def iterate_texts(data_dir, name):
    """Yields what `load_texts` returns, holding one text at a time."""
    path = Path(data_dir) / name / TEXTS
    try:
        with open(path, encoding="utf-8") as f:
            for line in f:
                yield json.loads(line)
    except (OSError, ValueError) as e:
        raise _unprepared(path, e) from e


def _load_json(path):
    value = read_json(path)
    if value is None:
        raise _unprepared(path, "missing or damaged")
    return value


def _unprepared(path, error):
    reason = getattr(error, "strerror", None) or error
    return DataError(f"cannot read {path}: {reason}. Run `python -m pipeline prepare JOB.toml` first.")
