import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from pipeline.dataset import Split
from pipeline.subwords import PieceSplitter, sample_split
from pipeline.text import Tokenizer, train_tokenizer


def make_texts(num_words, length, count=400):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(["ba", "do", "ku", "mi", "ra", "st"], rng.integers(1, 5))) for _ in range(num_words)]
    return [" ".join(rng.choice(words, length)) for _ in range(count)]


TEXTS = make_texts(120, 6)
SPELLED = make_texts(400, 12)  # words that can be spelled in many ways


class Pieces:
    """A vocabulary given by hand."""

    def __init__(self, *pieces):
        self.pieces = [None, None, *pieces]


def make_split(rows):
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    tokens = np.concatenate([np.array(row, np.int32) for row in rows])
    return Split(tokens, offsets, np.arange(len(rows), dtype=np.int32), np.arange(len(rows)) + 100)


def rows_of(split):
    return [split.tokens[a:b].tolist() for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer(TEXTS, 357))


@pytest.fixture(scope="module")
def real(tokenizer):
    return make_split(tokenizer.encode(TEXTS))


@pytest.fixture(scope="module")
def letters():
    return Tokenizer(train_tokenizer(SPELLED, 500))


@pytest.fixture(scope="module")
def spelled(letters):
    return make_split(letters.encode(SPELLED))


def test_pairs_by_hand():
    # Ids: 2 "ab", 3 "a", 4 "b", 5 "abc", 6 "c". "abc" = "ab" + "c" only, since "bc" is no piece.
    splitter = PieceSplitter(Pieces("ab", "a", "b", "abc", "c"))
    split = make_split([[2], [5], [3, 1], []])
    always = splitter.split(split, 1.0, 10, seed=1, epoch=0)
    assert rows_of(always) == [[3, 4], [3, 4, 6], [3, 1], []]  # "abc" twice: into "ab" + "c", then "a" + "b" + "c"
    assert rows_of(splitter.split(split, 1.0, 2, seed=1, epoch=0)) == [[3, 4], [3, 4], [3, 1], []]
    assert rows_of(splitter.split(split, 0.0, 10, seed=1, epoch=0)) == rows_of(split)
    np.testing.assert_array_equal(always.labels, split.labels)
    np.testing.assert_array_equal(always.rows, split.rows)


def test_rate_is_the_probability():
    splitter = PieceSplitter(Pieces("ab", "a", "b"))
    split = splitter.split(make_split([[2] * 10_000]), 0.3, 20_000, seed=1, epoch=0)
    assert len(split.tokens) - 10_000 == pytest.approx(3000, abs=200)  # 4 standard deviations


def test_split_rows_spell_the_same_text(tokenizer, real):
    split = PieceSplitter(tokenizer).split(real, 0.5, 1000, seed=3, epoch=2)
    assert split.tokens.dtype == np.int32
    assert len(split.tokens) > 1.05 * len(real.tokens)
    pieces = tokenizer.pieces
    for row, before in zip(rows_of(split), rows_of(real), strict=True):
        if all(pieces[i] is not None for i in before):
            assert "".join(pieces[i] for i in row) == "".join(pieces[i] for i in before)


def test_every_epoch_and_seed_has_its_own_rows(tokenizer, real):
    splitter = PieceSplitter(tokenizer)
    found = [splitter.split(real, 0.3, 50, seed, epoch) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    assert len({tuple(split.tokens.tolist()) for split in found}) == 3


def test_the_same_rows_in_another_process(tokenizer, real, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    code = (
        "import sys; from pipeline.text import Tokenizer; from pipeline.subwords import PieceSplitter\n"
        "from tests.pipeline.test_subwords import TEXTS, make_split\n"
        "t = Tokenizer.load(sys.argv[1])\n"
        "print(PieceSplitter(t).split(make_split(t.encode(TEXTS)), 0.3, 50, 1, 5).tokens.tolist())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tokenizer.model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(PieceSplitter(tokenizer).split(real, 0.3, 50, 1, 5).tokens.tolist())


def sampled(split, tokenizer, texts=SPELLED, share=0.5, max_length=1000, seed=1, epoch=5):
    return sample_split(split, iter(texts), tokenizer, share, 0.2, max_length, seed, epoch)


def test_a_share_of_the_rows_is_drawn_and_spells_the_same_text(letters, spelled):
    split = sampled(spelled, letters)
    assert (split.tokens.dtype, split.offsets.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(split.labels, spelled.labels)
    np.testing.assert_array_equal(split.rows, spelled.rows)
    pieces = letters.pieces
    found = ["".join(pieces[i] for i in row) for row in rows_of(split)]
    assert found == ["\u2581" + text.replace(" ", "\u2581") for text in SPELLED]
    differing = np.mean([a != b for a, b in zip(rows_of(split), rows_of(spelled), strict=True)])
    assert differing == pytest.approx(0.5, abs=0.1)  # 4 standard deviations


def test_no_row_or_every_row_is_drawn(letters, spelled):
    none, every = sampled(spelled, letters, share=0.0), sampled(spelled, letters, share=1.0)
    assert rows_of(none) == rows_of(spelled)
    assert np.mean([a != b for a, b in zip(rows_of(every), rows_of(spelled), strict=True)]) > 0.9


def test_drawn_rows_are_cut_at_the_end(letters, spelled):
    cut = make_split([row[:7] for row in letters.encode(SPELLED)])
    whole = sampled(spelled, letters)
    assert rows_of(sampled(cut, letters, max_length=7)) == [row[:7] for row in rows_of(whole)]


def test_a_row_is_drawn_by_seed_epoch_and_place_alone(letters, spelled):
    """Whatever the other rows are, whatever was drawn before, and in a thread that has drawn already."""
    expected = rows_of(sampled(spelled, letters))
    few = make_split(letters.encode(SPELLED[:50]))
    assert rows_of(sampled(few, letters, SPELLED[:50])) == expected[:50]
    others = [*SPELLED[:30][::-1], *SPELLED[30:]]
    assert rows_of(sampled(make_split(letters.encode(others)), letters, others))[30:] == expected[30:]
    letters._processor.encode(SPELLED[0], enable_sampling=True, nbest_size=-1, alpha=0.2)
    found = []
    threads = [threading.Thread(target=lambda: found.append(rows_of(sampled(spelled, letters)))) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many switches between the threads as can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected] * 3


def test_drawn_rows_are_new_in_every_epoch_and_with_every_seed(letters, spelled):
    found = [rows_of(sampled(spelled, letters, seed=seed, epoch=epoch)) for seed, epoch in ((1, 5), (1, 6), (2, 5))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        # Equal where neither is drawn, and hardly elsewhere.
        assert np.mean([x == y for x, y in zip(found[a], found[b], strict=True)]) == pytest.approx(0.25, abs=0.1)
    twice = make_split(letters.encode(SPELLED[:1] * 100))
    assert len(set(map(tuple, rows_of(sampled(twice, letters, SPELLED[:1] * 100, share=1.0))))) > 50


def test_the_same_rows_are_drawn_in_another_process(letters, spelled, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(letters.model)
    code = (
        "import sys; from pipeline.text import Tokenizer\n"
        "from tests.pipeline.test_subwords import SPELLED, make_split, sampled\n"
        "t = Tokenizer.load(sys.argv[1])\n"
        "epochs = map(int, sys.argv[2:])\n"
        "found = {e: sampled(make_split(t.encode(SPELLED)), t, epoch=e).tokens.tolist() for e in epochs}\n"
        "print([found[e] for e in sorted(found)])"
    )
    for hash_seed, epochs in (("1", "567"), ("2", "756")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "tokenizer.model"), *epochs],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str([sampled(spelled, letters, epoch=e).tokens.tolist() for e in (5, 6, 7)])
