import hashlib
import io
import re
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece

from pipeline import text
from pipeline.errors import DataError, JobError

WORDS = """the film was good bad and very long short actors plot music never again really boring great wonderful
terrible story directed scene camera laughed cried audience slow funny watching beautiful ending expected""".split()
_RNG = np.random.Generator(np.random.PCG64(0))
TEXTS = [" ".join(WORDS[k] for k in _RNG.integers(0, len(WORDS), 11)) for _ in range(60)]
CHINESE = ["这部电影很好看", "演员的表演非常糟糕", "音乐好听情节无聊"]


def foreign_model(**options):
    model = io.BytesIO()
    defaults = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "hard_vocab_limit": False, "vocab_size": 60}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, minloglevel=3, **(defaults | options)
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def tokenizer():
    return text.Tokenizer(text.train_tokenizer(TEXTS, 300))


def test_model_has_the_ids_and_the_size_of_the_contract(tokenizer):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    assert tokenizer.vocab_size == 300
    assert (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id()) == (0, 1, -1, -1)
    assert tokenizer.sha256 == hashlib.sha256(tokenizer.model).hexdigest()


def test_encode_equals_sentencepiece_and_decodes_to_the_text(tokenizer):
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    rows = tokenizer.encode(TEXTS)
    assert all(row.dtype == np.int32 for row in rows)
    assert [row.tolist() for row in rows] == [processor.encode(t) for t in TEXTS]
    assert processor.decode(rows[0].tolist()) == TEXTS[0]


def test_characters_never_seen_become_bytes_not_unk(tokenizer):
    (row,) = tokenizer.encode(["电影 😀"])
    assert len(row) and text.UNK_ID not in row and text.PAD_ID not in row


def test_encode_cuts_at_the_end(tokenizer):
    whole, cut = tokenizer.encode(TEXTS[:1])[0], tokenizer.encode(TEXTS[:1], max_length=3)[0]
    assert len(whole) > 3
    np.testing.assert_array_equal(cut, whole[:3])


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_samples_of_one_text(model_type):
    tokenizer = text.Tokenizer(foreign_model(model_type=model_type))
    assert tokenizer.can_sample
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    drawn = [tokenizer.sample(TEXTS[0], 0.2, seed) for seed in range(50)]
    assert all(row.dtype == np.int32 and processor.decode(row.tolist()) == TEXTS[0] for row in drawn)
    assert len({tuple(row) for row in drawn}) > 25
    for seed in (49, 0, 2**31 - 1):
        np.testing.assert_array_equal(tokenizer.sample(TEXTS[0], 0.2, seed), tokenizer.sample(TEXTS[0], 0.2, seed))
    np.testing.assert_array_equal(tokenizer.sample(TEXTS[0], 0.2, 7), drawn[7])
    assert len(tokenizer.sample("", 0.2, 0)) == 0
    np.testing.assert_array_equal(tokenizer.sample("good\0\ud800", 0.2, 3), tokenizer.sample("good \ufffd", 0.2, 3))


def test_samples_are_drawn_in_proportion():
    """From all segmentations, each with its probability to the power alpha."""
    tokenizer = text.Tokenizer(foreign_model())
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    scores = {tuple(row): sum(map(processor.get_score, row)) for row in processor.nbest_encode_as_ids("the", 100)}
    assert 1 < len(scores) < 100
    shares = np.exp(0.2 * np.array(list(scores.values())))
    drawn = [tuple(tokenizer.sample("the", 0.2, seed).tolist()) for seed in range(4000)]
    assert set(drawn) <= set(scores)
    found = np.array([drawn.count(row) for row in scores]) / 4000
    np.testing.assert_allclose(found, shares / shares.sum(), atol=0.032)  # 4 standard deviations


def test_a_mask_is_a_control_symbol(tokenizer):
    with_mask = text.Tokenizer(text.train_tokenizer(TEXTS, 300, mask=True))
    processor = sentencepiece.SentencePieceProcessor(model_proto=with_mask.model)
    assert (with_mask.vocab_size, with_mask.mask_id, processor.id_to_piece(2)) == (300, 2, "<mask>")
    assert with_mask.pieces[:3] == [None] * 3
    rows = with_mask.encode(["<mask>", "good <mask> film", *TEXTS])
    assert 2 not in np.concatenate([*rows, *(with_mask.sample("good <mask> film", 0.2, seed) for seed in range(20))])
    assert processor.decode(rows[0].tolist()) == "<mask>"
    assert tokenizer.mask_id == -1
    # One that a text can be parsed into is none.
    assert text.Tokenizer(foreign_model(user_defined_symbols=["<mask>"], vocab_size=70)).mask_id == -1


def test_case_folding(tokenizer):
    """SentencePiece's table is Unicode's simple folding after NFKC: one letter for one, and no locale."""
    folding = text.Tokenizer(text.train_tokenizer(TEXTS, 300, case_folding=True))
    same = [
        ("Good FILM", "good film"), ("ΣΊΣΥΦΟΣ", "σίσυφος"), ("ς", "σ"), ("Ｆｕｌｌ", "full"), ("ẞ", "ß"), ("ﬀI", "ffi"),
        ("Ⅷ", "viii"), ("ФИЛЬМ", "фильм"), ("I", "i"),
    ]  # fmt: skip
    for pair in same:
        assert len({tuple(row) for row in folding.encode(pair)}) == 1, pair
        assert len({tuple(folding.sample(form, 0.2, 7)) for form in pair}) == 1, pair
    for pair in (("ß", "ss"), ("I", "ı"), ("İ", "i"), ("é", "e")):
        assert len({tuple(row) for row in folding.encode(pair)}) == 2, pair
    assert len({tuple(row) for row in tokenizer.encode(["Good FILM", "good film"])}) == 2


def test_a_tokenizer_without_a_mask_is_what_it_was(tokenizer):
    # Of SentencePiece 0.2.1: a published model's tokenizer comes out again.
    assert tokenizer.sha256 == "6198c502cfa90efdfaa01bf2fc45baa1e3d57445c9aa0d5f871e64aaeddf6809"


def test_empty_inputs(tokenizer):
    assert tokenizer.encode([]) == []
    assert [len(row) for row in tokenizer.encode(["", "  \n"])] == [0, 0]


def test_lone_surrogates_count_as_replacement_characters(tokenizer):
    broken, replaced = tokenizer.encode(["good \ud83d film\udc00", "good \ufffd film\ufffd"])
    np.testing.assert_array_equal(broken, replaced)


@pytest.mark.parametrize(
    ("texts", "received"),
    [("good", "texts='good' (str)"), (["a", None], "texts[1]=None (NoneType)"), ([b"a"], "texts[0]=b'a' (bytes)")],
)
def test_encode_refuses_what_is_not_a_list_of_strings(tokenizer, texts, received):
    with pytest.raises(DataError, match=re.escape(f"Received: {received}")):
        tokenizer.encode(texts)


def test_training_gives_equal_bytes_in_another_process(tokenizer):
    code = (
        "import sys, hashlib; from pipeline import text; from tests.pipeline.test_text import TEXTS;"
        "sys.stdout.write(hashlib.sha256(text.train_tokenizer(TEXTS, 300)).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == tokenizer.sha256
    assert done.stderr == ""


def test_nothing_is_printed_when_sentencepiece_fails(capfd):
    for size in (8, 100_000):
        with pytest.raises(JobError):
            text.train_tokenizer(TEXTS, size)
    for model in (b"", b"not a model", b"\xf8\x07\x01"):
        with pytest.raises(JobError):
            text.Tokenizer(model)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_large_corpus_is_sampled_the_same_way_each_time(monkeypatch):
    monkeypatch.setattr(text, "_TRAINING_TEXTS", 40)
    assert len(text._sample(TEXTS)) == 40
    assert text._sample(TEXTS) == text._sample(list(TEXTS))
    monkeypatch.setattr(text, "_TRAINING_CHARS", sum(map(len, TEXTS)) // 4 + 4)
    assert len(text._sample(TEXTS)) == 15
    assert text._sample(["a" * 10**6]) == ["a" * 10**6]


@pytest.mark.parametrize(
    "only",
    [
        "zebra okapi " * 1000,
        "zebra\0okapi zebra\0okapi",
        "zebra\nokapi\r\nzebra\tokapi",
        "zebra \u2585 okapi zebra okapi",
        "\ud800 zebra okapi",
    ],
    ids=["long", "nul", "lines", "reserved", "surrogate"],
)
def test_no_text_is_left_out(only):
    # SentencePiece alone skips the first and the fourth without a word, and fails on the last.
    with pytest.raises(JobError, match="at most") as e:
        text.train_tokenizer([only], 100_000)
    size = int(re.search(r"at most (\d+)", str(e.value))[1])
    assert size > 258 + len(set("zebraokp"))  # pad, unk, 256 bytes, and every letter


@pytest.mark.parametrize("texts", [TEXTS, CHINESE, ["a"]])
@pytest.mark.parametrize(
    ("size", "limit"), [(10**12, "at most"), (100_000, "at most"), (8, "at least"), (259, "at least")]
)
def test_a_size_that_does_not_fit_is_answered_with_the_limit(texts, size, limit):
    with pytest.raises(JobError, match=rf"Set tokenizer\.vocab_size to {limit} \d+.*Received: vocab_size={size}$") as e:
        text.train_tokenizer(texts, size)
    assert "\n" not in str(e.value)
    named = int(re.search(rf"{limit} (\d+)", str(e.value))[1])
    assert text.Tokenizer(text.train_tokenizer(texts, named)).vocab_size == named
    assert text.train_tokenizer(texts, size, hard_vocab_limit=False) == text.train_tokenizer(texts, named)
    with pytest.raises(JobError, match="or set tokenizer.hard_vocab_limit to false"):
        text.train_tokenizer(texts, named + (1 if limit == "at most" else -1))


@pytest.mark.parametrize("texts", [[], [""], [" \n"]])
def test_no_text_is_a_data_error(texts):
    with pytest.raises(DataError, match=r"cannot train a tokenizer on \d texts") as e:
        text.train_tokenizer(texts, 300)
    assert "\n" not in str(e.value)


def test_a_users_model_with_bos_and_eos_adds_neither():
    tokenizer = text.Tokenizer(foreign_model(bos_id=2, eos_id=3))
    ids = np.concatenate(tokenizer.encode(TEXTS))
    assert not np.isin([2, 3], ids).any()


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"pad_id": -1, "unk_id": 0}, "pad_id=-1, unk_id=0"),
        ({"pad_id": 0, "unk_id": 2, "eos_id": 1}, "pad_id=0, unk_id=2"),
    ],
)
def test_load_refuses_other_ids(tmp_path, options, received):
    path = tmp_path / "theirs.model"
    path.write_bytes(foreign_model(**options))
    with pytest.raises(JobError, match=f"theirs.model must have pad id 0 and unk id 1.*Received: {received}"):
        text.Tokenizer.load(path)


@pytest.mark.parametrize("content", [b"", b"text,label\n", bytes(range(256)), b"\xf8\x07\x01"])
def test_load_refuses_what_is_no_model(tmp_path, content):
    path = tmp_path / "some.file"
    path.write_bytes(content)
    with pytest.raises(JobError, match="some.file is not a SentencePiece model"):
        text.Tokenizer.load(path)


def test_load_refuses_half_a_model_and_no_file(tmp_path, tokenizer):
    (tmp_path / "half.model").write_bytes(tokenizer.model[:-100])
    with pytest.raises(JobError, match="half.model is not a SentencePiece model"):
        text.Tokenizer.load(tmp_path / "half.model")
    with pytest.raises(JobError, match="cannot read the tokenizer .*absent.model: No such file"):
        text.Tokenizer.load(tmp_path / "absent.model")


def test_load_reads_what_train_wrote(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tokenizer.model)
    assert text.Tokenizer.load(path).sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        ([[5, 6, 7], [], [8]], 0, [[5, 6, 7], [0, 0, 0], [8, 0, 0]]),
        ([[5]], 3, [[5, 0, 0]]),
        ([[5, 6]], 1, [[5, 6]]),
        ([[], []], 0, [[0], [0]]),
        ([np.array([4, 5], np.int32), np.array([6], np.int32)], 0, [[4, 5], [6, 0]]),
    ],
)
def test_pad(rows, length, expected):
    padded = text.pad(rows, length)
    assert padded.dtype == np.int32
    np.testing.assert_array_equal(padded, expected)


def test_pad_of_nothing_has_no_rows():
    assert text.pad([]).shape == (0, 1)


def test_importing_text_loads_nothing_heavy():
    heavy = {"tensorflow", "keras", "pydantic", "pyarrow", "pipeline.config"}
    code = f"import sys, pipeline.text; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_nul_counts_as_a_blank(tokenizer):
    found, expected = tokenizer.encode(["good\0film", "\0"]), tokenizer.encode(["good film", " "])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_long_repetitive_text_does_not_count_beyond_its_start():
    texts = [f"the film number {i} was fine" for i in range(200)]
    assert text.train_tokenizer([*texts, "word " * 2000], 300) == text.train_tokenizer([*texts, "word " * 200_000], 300)
