import numpy as np
import pytest

from pipeline import reading
from pipeline.splitting import content_keys, split_rows

WORDS = "the film was good bad and very long short actors plot music never again really boring great story".split()


def make_texts(count, seed=0):
    rng = np.random.Generator(np.random.PCG64(seed))
    return [
        f"{i} " + " ".join(WORDS[k] for k in rng.integers(0, len(WORDS), rng.integers(1, 20))) for i in range(count)
    ]


TEXTS = make_texts(300)


def from_rows(texts, labels=None, **sources):
    """Sources as `split_rows` takes them: train from texts, the others from lists of texts."""
    everything = {"train": (texts, labels or ["a"] * len(texts))} | {n: (t, ["a"] * len(t)) for n, t in sources.items()}
    return {n: reading.Rows(t, names, np.arange(len(t)), [(f"{n}.csv", 0)], 0) for n, (t, names) in everything.items()}


def test_content_keys_ignore_case_width_and_white_space_only():
    keys = content_keys(["Good  Film", " good\tfilm\n", "ＧＯＯＤ film", "goodfilm", "STRASSE", "straße"])
    assert keys.dtype == np.uint64
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert keys[4] == keys[5]
    # python3 -c "import hashlib; print(hashlib.blake2b(b'good film', digest_size=8).hexdigest())"
    assert keys[0] == 0x01321B0036CC38EA


def test_split_sizes_are_near_the_fractions():
    splits, _ = split_rows(from_rows(make_texts(20_000)), 0.1, 0.2)
    sizes = {name: len(split.texts) for name, split in splits.items()}
    # Four standard deviations of a binomial count.
    assert sizes["validation"] == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)
    assert sizes["test"] == pytest.approx(4000, abs=4 * (20_000 * 0.2 * 0.8) ** 0.5)


def test_a_row_never_moves():
    def texts_of(texts, **sources):
        splits, _ = split_rows(from_rows(texts, **sources), 0.1, 0.1)
        return {name: set(split.texts) for name, split in splits.items()}

    few, many = texts_of(TEXTS), texts_of(["new " + t for t in TEXTS] + TEXTS[::-1])
    for name in few:
        assert few[name] == many[name] & set(TEXTS)
    own_test = texts_of(TEXTS, test=["something else"])
    assert own_test["validation"] == few["validation"]
    assert own_test["train"] == few["train"] | few["test"]


def test_a_text_under_two_labels_stays_together():
    splits, _ = split_rows(from_rows(TEXTS + TEXTS, ["a"] * 300 + ["b"] * 300), 0.3, 0.3)
    for split in splits.values():
        assert len(split.texts) == 2 * len(set(split.texts))
