"""Which rows train, validate and test: by content alone, without copies across splits, checked.

A row's split depends on its text and the fractions only, so it never moves when rows are added, and copies of a
text stay together.
"""

import collections
import dataclasses
import hashlib
import unicodedata

import numpy as np

from pipeline.errors import DataError
from pipeline.reading import join_some

SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, eq=False)
class SplitRows:
    """The rows of one split.

    Attributes:
        source: the section of `data` they were read from: "train", "validation" or "test".
        texts: str per row.
        labels: str per row.
        keys: uint64 `[rows]`, `content_keys` of the texts.
        numbers: int64 `[rows]`, the row's number in its source.
    """

    source: str
    texts: list
    labels: list
    keys: np.ndarray
    numbers: np.ndarray

    def where(self, keep):
        """Returns the rows at which the boolean array `keep` is true."""
        chosen = np.flatnonzero(keep)
        texts, labels = [self.texts[i] for i in chosen], [self.labels[i] for i in chosen]
        return SplitRows(self.source, texts, labels, self.keys[chosen], self.numbers[chosen])


def content_keys(texts):
    """Returns uint64 `[rows]`: BLAKE2b of each text after NFKC, casefold, and white space made single blanks."""
    digests = []
    for text in texts:
        text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
        digests.append(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def split_rows(sources, validation_fraction, test_fraction):
    """Splits the rows of the sources.

    A split without a source is carved from train by u, the content key as a number in [0, 1): test where
    u < test_fraction, validation where u >= 1 - validation_fraction. Then copies across splits are removed from
    the training side: test keeps all its rows, validation all that are not in test.

    Args:
        sources: source name -> `pipeline.reading.Rows`; "train" at least.
        validation_fraction: share of train to validate with.
        test_fraction: share of train to test with.

    Returns:
        ({split: SplitRows}, {(split, other): rows of split removed because other has their text})
    """
    splits = {name: SplitRows(name, s.texts, s.labels, content_keys(s.texts), s.numbers) for name, s in sources.items()}
    train = splits["train"]
    u = (train.keys >> np.uint64(11)) / 2.0**53  # the 53 bits that float64 holds exactly
    in_test = (u < test_fraction) & ("test" not in sources)
    in_validation = (u >= 1 - validation_fraction) & ("validation" not in sources)
    splits.setdefault("test", train.where(in_test))
    splits.setdefault("validation", train.where(in_validation))
    splits["train"] = train.where(~in_test & ~in_validation)
    removed = {}
    for name, other in (("validation", "test"), ("train", "test"), ("train", "validation")):
        copied = np.isin(splits[name].keys, splits[other].keys)
        removed[name, other] = int(copied.sum())
        splits[name] = splits[name].where(~copied)
    return {name: splits[name] for name in SPLITS}, removed


def choose_unlabelled(source, splits):
    """Returns the unlabelled rows to pretrain on: each text once, and none that a split has already.

    A text to validate or test with must not be seen before; one of train is there with its label.

    Args:
        source: `pipeline.reading.Rows` without labels.
        splits: what `split_rows` returned.

    Returns:
        (SplitRows, {split or "unlabelled": rows left out because it has their text})

    Raises:
        DataError: no row is left.
    """
    rows = SplitRows("unlabelled", source.texts, source.labels, content_keys(source.texts), source.numbers)
    removed = {}
    for name in reversed(SPLITS):
        copied = np.isin(rows.keys, splits[name].keys)
        removed[name] = int(copied.sum())
        rows = rows.where(~copied)
    is_first = np.zeros(len(rows.keys), bool)
    is_first[np.unique(rows.keys, return_index=True)[1]] = True
    removed["unlabelled"] = int((~is_first).sum())
    rows = rows.where(is_first)
    if not rows.texts:
        raise DataError(
            f"data.unlabelled has no text of its own: each of its {len(source.texts) + source.blank} rows is blank or "
            "a copy of a row in data.train, data.validation or data.test. Give other texts, or leave data.unlabelled "
            "empty: pretraining uses the training texts anyway."
        )
    return rows, removed


def check_splits(sources, splits, known_labels=()):
    """Refuses splits that cannot be trained on or measured with.

    Args:
        sources: as in `split_rows`.
        splits: what `split_rows` returned.
        known_labels: labels that are classes of the model whether or not train has rows of them.

    Raises:
        DataError: there are fewer than two classes, a split has no rows, a class has no row left in train, or
            a validation or test file has a label that is no class.
    """
    labels = collections.Counter(sources["train"].labels)
    if len(labels.keys() | set(known_labels)) < 2:
        raise DataError(
            "data.train has fewer than two classes. Give rows of at least two, or correct data.label_column. "
            f"Received: labels={list(labels)}"
        )
    for name in SPLITS[1:]:
        for row, label in enumerate(sources[name].labels if name in sources else ()):
            if label not in labels and label not in known_labels:
                raise DataError(
                    f"{sources[name].place(row)}: label {label!r} never occurs in data.train, which has "
                    f"{join_some(sorted(labels))}. Correct the label, remove the row, or add such rows to data.train."
                )
    for name, split in splits.items():
        if not split.texts:
            raise DataError(
                f"the {name} split has no rows: of {len(sources[split.source].texts)} rows in data.{split.source} none "
                f"was chosen for it, or all are copies of rows in another split. "
                "Give more rows, or change the files or fractions in [data]."
            )
    kept = {*splits["train"].labels, *known_labels}
    for label, count in sorted(labels.items()):
        if label not in kept:
            raise DataError(
                f"class {label!r} has no row left to train on: each of its {count} rows in data.train fell to the "
                "validation or test split, or is a copy of a row there. Give more rows of it, or remove the class."
            )


def describe_duplicates(splits, removed):
    """Returns the report's counts of equal texts: removed across splits, kept within, and with several labels."""
    train = splits["train"]
    labels_per_text = collections.Counter(key for key, _ in set(zip(train.keys.tolist(), train.labels, strict=True)))
    return {
        "removed": {f"{name}_in_{other}": count for (name, other), count in removed.items()},
        "within": {name: len(split.keys) - len(np.unique(split.keys)) for name, split in splits.items()},
        "train_texts_with_several_labels": sum(count > 1 for count in labels_per_text.values()),
    }
