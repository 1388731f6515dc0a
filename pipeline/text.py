"""SentencePiece, the one tokenizer of training, of the SavedModel and of the ONNX file: train, load, encode.

Imports SentencePiece and NumPy only, so that a service can use it without TensorFlow.
"""

import hashlib
import io
import os
import re
import threading
from pathlib import Path

import numpy as np
import sentencepiece

from pipeline.contract import MASK, PAD_ID, UNK_ID
from pipeline.errors import DataError, JobError

# What SentencePiece logs as an error it also raises.
sentencepiece.set_min_log_level(3)

# The trainer holds about 14 bytes per character and needs about 20 s for 100 million of them.
_TRAINING_TEXTS = 1_000_000
_TRAINING_CHARS = 100_000_000
# The trained model depends on the number of threads (sums are taken per thread), so it is not the machine's.
_TRAINING_THREADS = 16
# More than the trainer can find (a million seed pieces, and every character of Unicode), so that a larger
# number is answered with the true limit.
_VOCAB_LIMIT = 1 << 22
# Starting a thread costs about as much as encoding this many texts.
_TEXTS_PER_THREAD = 64

# The trainer leaves out, silently, every text that holds this character.
_RESERVED = "\u2585"

# Training time grows with the square of a text's length where it repeats itself (200 kB: 42 s).
_TRAINING_TEXT_CHARS = 10_000

# SentencePiece keeps one seed per process: from setting it to drawing with it, one thread at a time.
_SAMPLING = threading.Lock()

_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text):
    """Returns `text` with each lone surrogate, which UTF-8 cannot hold, as U+FFFD and each NUL as a blank.

    Some interfaces of ONNX Runtime end a string at NUL: it must not mean anything.
    """
    return _SURROGATE.sub("\ufffd", text).replace("\0", " ")


class _VocabularyLimit(Exception):
    """The texts allow no vocabulary of the size that was asked for.

    Attributes:
        nearest: the size that comes nearest to it and works.
    """

    def __init__(self, nearest):
        super().__init__(nearest)
        self.nearest = nearest


def train_tokenizer(texts, vocab_size, mask=False, case_folding=False, hard_vocab_limit=True):
    """Trains a SentencePiece unigram model with byte fallback; pad 0, unk 1, neither bos nor eos.

    Equal texts give equal bytes. Of a text the first 10,000 characters count; of more than a million texts or 100
    million characters a fixed sample is used.

    Args:
        texts: list of str.
        vocab_size: number of pieces.
        mask: whether MASK is one of them, with id 2.
        case_folding: whether letters that differ in case alone, e.g. "A" and "a", are the same to the tokenizer.
        hard_vocab_limit: False: where the texts do not allow `vocab_size` pieces, the nearest number that they allow.

    Returns:
        The model as bytes, what `Tokenizer` takes.

    Raises:
        JobError: `vocab_size` is too small for the characters of the texts or too large for the texts, and
            `hard_vocab_limit` is set; names the nearest number that works.
        DataError: there is no text to learn from.
    """
    texts = [well_formed(text[:_TRAINING_TEXT_CHARS]).replace(_RESERVED, " ") for text in _sample(texts)]
    rule = "nmt_nfkc_cf" if case_folding else "nmt_nfkc"
    # Of nothing visible the trainer would end the process.
    normalizer = sentencepiece.SentencePieceNormalizer(rule_name=rule)
    if not any(normalizer.normalize(text).strip() for text in texts):
        raise _untrainable("the texts are blank", len(texts))
    try:
        return _train(texts, vocab_size, mask, rule)
    except _VocabularyLimit as e:
        if not hard_vocab_limit:
            return _train(texts, e.nearest, mask, rule)
        is_more = e.nearest < vocab_size
        raise JobError(
            f"tokenizer.vocab_size={vocab_size} is "
            f"{'more than this corpus allows' if is_more else 'less than the characters of this corpus need'}. "
            f"Set tokenizer.vocab_size to at {'most' if is_more else 'least'} {e.nearest}, "
            f"{'give more text, ' if is_more else ''}or set tokenizer.hard_vocab_limit to false. "
            f"Received: vocab_size={vocab_size}"
        ) from e


def _train(texts, vocab_size, mask, rule):
    """Returns the model as bytes. Raises _VocabularyLimit, or DataError as `train_tokenizer`."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="unigram",
            vocab_size=min(vocab_size, _VOCAB_LIMIT),
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            eos_id=-1,
            control_symbols=[MASK] if mask else [],
            byte_fallback=True,
            normalization_rule_name=rule,
            max_sentence_length=1 << 30,  # bytes, the largest allowed; longer ones would be left out silently
            num_threads=_TRAINING_THREADS,
            minloglevel=3,
        )
    except (RuntimeError, ValueError) as e:
        if found := re.search(r"too high .*<= (\d+)|smaller than required_chars\. \d+ vs (\d+)", str(e)):
            raise _VocabularyLimit(int(found[1] or found[2])) from e
        raise _untrainable(str(e), len(texts)) from e
    return model.getvalue()


def _sample(texts):
    """All texts, or a fixed sample: SentencePiece's own differs from process to process."""
    chars = sum(map(len, texts))
    keep = min(_TRAINING_TEXTS, len(texts) * _TRAINING_CHARS // max(chars, 1))
    if len(texts) <= keep:
        return texts
    chosen = np.random.Generator(np.random.PCG64(0)).permutation(len(texts))[: max(keep, 1)]
    return [texts[i] for i in np.sort(chosen)]


def _untrainable(message, num_texts):
    return DataError(
        f"cannot train a tokenizer on {num_texts} texts: SentencePiece found nothing to learn from "
        f"({' '.join(message.split())}). Give texts with visible characters."
    )


class Tokenizer:
    """A SentencePiece model: str -> token ids.

    Attributes:
        model: the model as bytes, as in `tokenizer.model`.
    """

    def __init__(self, model, source="the tokenizer"):
        """Loads a model.

        Args:
            model: bytes.
            source: what an error calls it, e.g. its path.

        Raises:
            JobError: these bytes are no SentencePiece model, or pad is not 0 or unk is not 1.
        """
        self.model = bytes(model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
            pieces = self._processor.get_piece_size()
        except RuntimeError:
            pieces = 0
        if not pieces:
            raise JobError(f"{source} is not a SentencePiece model. Give the .model file that SentencePiece wrote.")
        pad, unk = self._processor.pad_id(), self._processor.unk_id()
        if (pad, unk) != (PAD_ID, UNK_ID):
            raise JobError(
                f"{source} must have pad id {PAD_ID} and unk id {UNK_ID}. Train it with --pad_id={PAD_ID} "
                f"--unk_id={UNK_ID} --bos_id=-1 --eos_id=-1. Received: pad_id={pad}, unk_id={unk}"
            )

    @classmethod
    def load(cls, path):
        """Loads a model file.

        Raises:
            JobError: it cannot be read, or is refused by `Tokenizer`; names the file.
        """
        try:
            return cls(Path(path).read_bytes(), source=str(path))
        except OSError as e:
            raise JobError(
                f"cannot read the tokenizer {path}: {e.strerror}. Give the path of a SentencePiece model."
            ) from e

    @property
    def vocab_size(self):
        """Number of pieces, PAD and UNK included."""
        return self._processor.get_piece_size()

    @property
    def pieces(self):
        """The string of each piece in the order of the ids; None for those that no text is spelled with by itself.

        Such are PAD, UNK, other control symbols, unused pieces and single bytes.
        """
        p = self._processor
        spelled = [not (p.is_control(i) or p.is_unknown(i) or p.is_unused(i) or p.is_byte(i)) for i in range(len(p))]
        return [p.id_to_piece(i) if spelled[i] else None for i in range(len(p))]

    @property
    def mask_id(self):
        """The id of MASK, -1 where there is none; it must be a control symbol, so that no text is parsed into it."""
        found = self._processor.piece_to_id(MASK)  # UNK's, where there is none
        return found if self._processor.is_control(found) else -1

    @property
    def can_sample(self):
        """True when `sample` can draw: unigram and BPE models. Of others it returns no token at all."""
        return len(self.sample("a", 1.0, 0)) > 0

    @property
    def sha256(self):
        """SHA-256 of the model's bytes as 64 hex digits."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, texts, max_length=None):
        """Returns the token ids of each text; nothing is added in front or behind.

        Args:
            texts: list of str; lone surrogates count as U+FFFD, NUL as a blank.
            max_length: longer rows are cut at the end; None: none is.

        Returns:
            A list of int32 arrays, one per text.

        Raises:
            DataError: `texts` is not a list of str.
        """
        if isinstance(texts, str):
            raise DataError(f"texts must be a list of strings. Received: texts={texts[:40]!r} (str)")
        texts = list(texts)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"texts must be strings. Received: texts[{i}]={text!r} ({type(text).__name__})")
        threads = min(os.cpu_count() or 1, 1 + len(texts) // _TEXTS_PER_THREAD)
        rows = self._processor.encode([well_formed(text) for text in texts], out_type=int, num_threads=threads)
        return [np.array(row[:max_length], np.int32) for row in rows]

    def sample(self, text, alpha, seed):
        """Returns the token ids of one segmentation, drawn from all there are (Kudo 2018, "Subword Regularization").

        A pure function of the arguments, in every process and from any thread; about 50 us for a sentence, in which no
        other Python thread runs. It leaves SentencePiece's process-wide seed changed, which nothing else here uses.

        Args:
            text: str, as in `encode`.
            alpha: the lower, the more evenly drawn; of a BPE model, the probability that a merge is left out.
            seed: int in [0, 2**31).

        Returns:
            int32 array.
        """
        with _SAMPLING:
            sentencepiece.set_random_generator_seed(seed)
            # A thread's generator takes the seed when the thread first samples, and only then. A list of two texts is
            # encoded in new threads; here it is one, which takes them in order. (A single text would be encoded in
            # this thread, whose generator may have been used.)
            row, _ = self._processor.encode(
                [well_formed(text), ""], out_type=int, enable_sampling=True, nbest_size=-1, alpha=alpha, num_threads=1
            )
        return np.array(row, np.int32)


def pad(rows, length=0):
    """Fills rows up to a common length with PAD at the end.

    Args:
        rows: sequence of B one-dimensional int sequences.
        length: at least this many positions.

    Returns:
        int32 `[B, T]`, T = max(1, length, longest row).
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    token_ids = np.full((len(rows), max(1, length, lengths.max(initial=0))), PAD_ID, np.int32)  # [B, T]
    if lengths.any():
        token_ids[np.arange(token_ids.shape[1]) < lengths[:, None]] = np.concatenate(rows)
    return token_ids
