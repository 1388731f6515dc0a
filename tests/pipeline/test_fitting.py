"""What is fitted to the best weights: always the same, kept, and fitted again when it is not that of these weights."""

import numpy as np
import pytest

from pipeline import dataset, fitting
from pipeline.batches import sequential_plan
from pipeline.calibrated import CalibratedClassifier, build_calibrated, predict_parts
from pipeline.checkpoint import Checkpoint, Progress
from pipeline.classifier import build_classifier, compile_predict
from pipeline.config import load_job
from pipeline.errors import Interrupted
from pipeline.evaluation import softmax
from tests.jobs import make_job

PAIRS = 400


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(config, run directory, encoder)."""
    job = make_job(tmp_path_factory.mktemp("job"), model={"ngram_pairs": PAIRS})
    config = load_job(job.file)
    dataset.prepare(config, job.run_dir / "data")
    vocab_size = dataset.load_report(job.run_dir / "data")["vocab_size"]
    return config, job.run_dir, build_classifier(config.model, vocab_size, 2, seed=1)


def best_of(encoder, key="key"):
    return Checkpoint({w.path: w.numpy() for w in encoder.weights}, Progress(), key)


def values(model):
    return [w.numpy().tobytes() for w in model.weights]


def test_what_is_kept_is_what_was_fitted(prepared, monkeypatch):
    config, run_dir, encoder = prepared
    path = run_dir / fitting.FITTED
    model = fitting.fit_to(encoder, config, run_dir, best_of(encoder))
    written, fits = path.read_bytes(), []
    fit = fitting._fit
    monkeypatch.setattr(fitting, "_fit", lambda *args: fits.append(1) or fit(*args))
    assert values(fitting.fit_to(encoder, config, run_dir, best_of(encoder))) == values(model)
    assert fits == []

    damaged = bytearray(written)
    damaged[written.index(model.ngrams.table.numpy().tobytes()) + 100] ^= 1
    hidden = bytearray(written)  # all parts of the archive but the first are taken for a comment on it
    hidden[written.index(b"PK\x01\x02") + 33] ^= 8
    for content in (damaged, hidden, written[: len(written) // 2], b""):
        path.write_bytes(content)
        assert values(fitting.fit_to(encoder, config, run_dir, best_of(encoder))) == values(model)
        assert path.read_bytes() == written
    assert len(fits) == 4
    path.unlink()
    with pytest.raises(Interrupted):
        fitting.fit_to(encoder, config, run_dir, best_of(encoder), stop=_interrupt)
    assert not path.exists()

    fitting.fit_to(encoder, config, run_dir, best_of(encoder, "another key"))
    assert path.read_bytes() != written
    others = Checkpoint({w.path: w.numpy() + 1 for w in encoder.weights}, Progress(), "key")
    assert fitting._key(others) != fitting._key(best_of(encoder))


def _interrupt():
    raise Interrupted("now")


def test_it_lowers_the_loss_and_the_parts_add_up(prepared):
    config, run_dir, encoder = prepared
    model = fitting.fit_to(encoder, config, run_dir, best_of(encoder))
    split = dataset.Split.load(run_dir / "data", "validation")
    plan = sequential_plan(split.lengths, 256)
    logits, encoded, scores = predict_parts(model, split, plan)
    scalars = model.fitted_scalars()
    np.testing.assert_allclose(logits, encoded + scalars["ngram_weight"] * scores, atol=1e-5)
    np.testing.assert_allclose(compile_predict(model)(split.token_ids(plan[0])), logits[plan[0]], atol=1e-5)

    def loss(logits):
        return -np.log(softmax(logits)[np.arange(len(split)), split.labels]).mean()

    # The encoder knows nothing yet, the n-grams tell nearly all.
    assert loss(logits / scalars["temperature"]) < 0.5 * min(loss(encoded), loss(scores))
    assert scalars["ngram_weight"] > 1
    np.testing.assert_allclose(model.probabilities(logits), softmax(logits / scalars["temperature"]), atol=1e-6)


def test_the_characters_have_a_part_in_it(prepared, monkeypatch):
    config, run_dir, encoder = prepared
    mixed, mix = [], fitting.ngrams.mix
    monkeypatch.setattr(fitting.ngrams, "mix", lambda *args: mixed.append(args) or mix(*args))
    arrays = fitting._fit(encoder, config, run_dir / "data", lambda: None)
    ((machines, shares),) = mixed
    assert len(machines) == 2 and sum(shares) == pytest.approx(1)
    np.testing.assert_array_equal(arrays["table"], mix(machines, shares)["table"])


def test_without_ngrams_the_logits_are_the_encoders(prepared):
    config, run_dir, encoder = prepared
    token_ids = dataset.Split.load(run_dir / "data", "test").token_ids(np.arange(20))
    plain = CalibratedClassifier(encoder)
    plain.temperature.assign(3.0)
    np.testing.assert_array_equal(compile_predict(plain)(token_ids), compile_predict(encoder)(token_ids))
    assert plain.fitted_scalars() == {"temperature": 3.0}
    assert len(plain.weights) == len(encoder.weights) + 1


def test_saved_and_loaded(prepared, tmp_path):
    import keras

    config, run_dir, encoder = prepared
    token_ids = dataset.Split.load(run_dir / "data", "test").token_ids(np.arange(20))
    model = fitting.fit_to(encoder, config, run_dir, best_of(encoder))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert values(again) == values(model)
    np.testing.assert_allclose(again(token_ids), model(token_ids), atol=1e-6)
    untrained = build_calibrated(config.model, model.vocab_size, 2)
    assert untrained.fitted_scalars() == {"temperature": 1.0, "ngram_weight": 0.0}
