import json
import tomllib

import pytest

from pipeline.config import EvaluationConfig, JobConfig, differences, fingerprint, load_job
from pipeline.errors import JobError
from pipeline.recipes import RECIPES

# The table of the contract, and what the gate asks of labels, our log_every_steps, what spells or hides tokens anew
# each epoch, and what shapes the objective and the step.
DEFAULTS = """
name = "movie-reviews"
seed = 17
work_dir = "runs"
[data]
train = "train.csv"
validation = ""
test = ""
unlabelled = ""
text_column = "text"
label_column = "label"
validation_fraction = 0.1
test_fraction = 0.1
allow_new_labels = false
[tokenizer]
vocab_size = 8000
hard_vocab_limit = true
case_folding = false
model_file = ""
[model]
d_model = 256
num_heads = 8
d_ff = 768
num_layers = 4
dropout = 0.1
head_dropout = 0.2
max_length = 256
pooling = "mean"
position = "sinusoidal"
norm = "pre"
activation = "gelu"
num_kv_heads = 0
attention = "full"
window = 64
global_tokens = 1
num_experts = 0
top_k = 2
convolution = 0
encoders = 1
ngram_pairs = 0
[training]
recipe = "reference"
epochs = 10
batch_tokens = 4096
batch_rows = 0
learning_rate = 3e-4
beta_2 = 0.999
warmup_ratio = 0.1
weight_decay = 1e-2
clip_norm = 1.0
strategy = "auto"
precision = "float32"
checkpoint_every_s = 300
checkpoint_every_steps = 0
keep_checkpoints = 3
patience = 3
log_every_steps = 10
subword_regularization = 0.0
subword_sampling = 0.0
subword_alpha = 0.2
token_dropout = 0.0
label_smoothing = 0.0
teacher = ""
teacher_weight = 0.5
class_weights = "none"
r_drop = 0.0
ema_decay = 0.0
accumulate_batches = 1
recompute = false
load_balancing = 0.01
[pretraining]
epochs = 0
learning_rate = 5e-4
masked_share = 0.15
[baseline]
enabled = true
[evaluation]
metric = "accuracy"
min_value = 0.0
max_regression = 0.0
beat_baseline = false
max_label_shift = 0.2
[export]
opset = 20
precisions = ["float32", "int8"]
text_signature = true
[publish]
base_path = "models"
keep_versions = 5
"""
MINIMAL = 'name = "movie-reviews"\n[data]\ntrain = "train.csv"\n'


@pytest.fixture
def load(tmp_path):
    def load(text=MINIMAL, overrides=()):
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        return load_job(path, overrides)

    return load


@pytest.fixture
def refuse(load):
    """Returns the message, one plain line, with which a job is refused."""

    def refuse(text=MINIMAL, overrides=()):
        with pytest.raises(JobError) as e:
            load(text, overrides)
        message = str(e.value)
        assert len(message.splitlines()) == 1
        assert "pydantic" not in message and "Traceback" not in message
        return message

    return refuse


def test_defaults_are_the_contracts(load):
    assert load().resolved() == tomllib.loads(DEFAULTS)


def test_a_baseline_that_is_to_be_beaten_is_fitted(load, refuse):
    assert load(overrides=["evaluation.beat_baseline=true"]).evaluation.beat_baseline
    overrides = ["evaluation.beat_baseline=true", "baseline.enabled=false"]
    assert "set baseline.enabled = true, or beat_baseline = false. Received: " in refuse(overrides=overrides)


def test_a_job_with_every_default_written_out_is_the_same_job(load):
    assert fingerprint(load(DEFAULTS).resolved()) == fingerprint(load().resolved())
    json.dumps(load().resolved())
    assert JobConfig.model_validate(load().resolved()) == load()


def test_directories(load):
    job = load(overrides=["work_dir=/a/b", "publish.base_path=out"])
    assert str(job.run_dir) == "/a/b/movie-reviews"
    assert str(job.model_dir) == "out/movie-reviews"


def test_sections_are_read_only(load):
    job = load()
    with pytest.raises(ValueError, match="frozen"):
        job.seed = 3
    with pytest.raises(ValueError, match="frozen"):
        job.model.d_model = 8


@pytest.mark.parametrize(
    ("text", "key", "advice"),
    [
        ("[training]\nlearning_rte = 1.0", "training.learning_rte", "Did you mean 'training.learning_rate'?"),
        ("[training]\nlearning-rate = 1.0", "training.learning-rate", "Did you mean 'training.learning_rate'?"),
        ("[training]\nd_model = 8", "training.d_model", "Did you mean 'model.d_model'?"),
        ("[modle]\nd_model = 8", "modle", "Did you mean 'model'?"),
        ("[training]\nxyz = 8", "training.xyz", "Valid keys in [training]: recipe, epochs, batch_tokens,"),
        ("[training.more]\nx = 8", "training.more", "Valid keys in [training]: recipe, epochs, batch_tokens,"),
        ("[publish]\nzzz = 8", "publish.zzz", "Valid keys in [publish]: base_path, keep_versions."),
    ],
)
def test_unknown_keys_in_sections(refuse, text, key, advice):
    message = refuse(MINIMAL + text)
    assert f"unknown key '{key}'. {advice}" in message


@pytest.mark.parametrize(
    ("line", "key", "advice"),
    [
        ("work_dirs = 'x'", "work_dirs", "Did you mean 'work_dir'?"),
        ("work-dir = 'x'", "work-dir", "Did you mean 'work_dir'?"),
        ("epochs = 3", "epochs", "Did you mean 'training.epochs'?"),
        ("str = 3", "str", "Valid keys: name, seed, work_dir, data,"),
        ("'' = 3", "", "Valid keys: name, seed, work_dir, data,"),
    ],
)
def test_unknown_keys_at_the_top(refuse, line, key, advice):
    assert f"unknown key '{key}'. {advice}" in refuse(f"{line}\n{MINIMAL}")


@pytest.mark.parametrize(
    ("override", "received"),
    [
        ("name=Reviews", "name='Reviews'"),
        ("name=a/b", "name='a/b'"),
        ("name=", "name=''"),
        ("seed=-1", "seed=-1"),
        ("seed=9223372036854775808", "seed=9223372036854775808"),
        ("seed=true", "seed=True"),
        ("data.train=2024", "train=2024"),
        ("data.train=[]", "train=[]"),
        ("data.train=", "train=''"),
        ("data.validation_fraction=0", "validation_fraction=0.0"),
        ("data.test_fraction=0", "test_fraction=0.0"),
        ("data.test_fraction=1", "test_fraction=1"),
        ("data.test_fraction=0.9", "validation_fraction=0.1, test_fraction=0.9"),
        ("tokenizer.vocab_size=7", "vocab_size=7"),
        ("model.d_model=0", "d_model=0"),
        ("model.d_model=257", "d_model=257, num_heads=8"),
        ("model.num_heads=7", "d_model=256, num_heads=7"),
        ("model.d_model=8.5", "d_model=8.5"),
        ("model.dropout=1.0", "dropout=1.0"),
        ("model.dropout=-0.1", "dropout=-0.1"),
        ("model.pooling=first", "pooling='first'"),
        ("model.position=rotary", "position='rotary'"),
        ("model.norm=none", "norm='none'"),
        ("model.activation=silu", "activation='silu'"),
        ("model.num_kv_heads=3", "num_heads=8, num_kv_heads=3"),
        ("model.attention=sparse", "attention='sparse'"),
        ("model.window=0", "window=0"),
        ("model.window=3000000000", "window=3000000000"),
        ("model.num_experts=100000", "num_experts=100000"),
        ("model.global_tokens=0", "global_tokens=0"),
        ("model.num_experts=1", "num_experts=1"),
        ("model.top_k=0", "top_k=0"),
        ("pretraining.epochs=-1", "epochs=-1"),
        ("pretraining.masked_share=0.0", "masked_share=0.0"),
        ("training.recompute=1", "recompute=1"),
        ("training.load_balancing=-1", "load_balancing=-1"),
        ("training.epochs=0", "epochs=0"),
        ("training.epochs='3'", "epochs='3'"),
        ("training.epochs=true", "epochs=True"),
        ("training.learning_rate=0", "learning_rate=0"),
        ("training.learning_rate=nan", "learning_rate=nan"),
        ("training.learning_rate=inf", "learning_rate=inf"),
        ("training.learning_rate=fast", "learning_rate='fast'"),
        ("training.warmup_ratio=1.1", "warmup_ratio=1.1"),
        ("training.clip_norm=0.0", "clip_norm=0.0"),
        ("training.precision=float16", "precision='float16'"),
        ("training.checkpoint_every_s=0", "checkpoint_every_s=0"),
        ("training.keep_checkpoints=0", "keep_checkpoints=0"),
        ("training.patience=-1", "patience=-1"),
        ("training.subword_sampling=1.1", "subword_sampling=1.1"),
        ("training.token_dropout=1.0", "token_dropout=1.0"),
        ("training.subword_alpha=0.0", "subword_alpha=0.0"),
        ("training.label_smoothing=1.0", "label_smoothing=1.0"),
        ("training.label_smoothing=-0.1", "label_smoothing=-0.1"),
        ("training.class_weights=even", "class_weights='even'"),
        ("training.class_weights=2", "class_weights=2"),
        ("training.class_weights={bad=0.0}", "bad=0.0"),
        ("training.class_weights={good=1.0, bad='2'}", "bad='2'"),
        ("training.class_weights.bad=-1", "bad=-1"),
        ("training.r_drop=-1", "r_drop=-1"),
        ("training.ema_decay=1.0", "ema_decay=1.0"),
        ("training.accumulate_batches=0", "accumulate_batches=0"),
        ("training.accumulate_batches=1.5", "accumulate_batches=1.5"),
        ("evaluation.metric=f1", "metric='f1'"),
        ("evaluation.max_regression=-0.1", "max_regression=-0.1"),
        ("evaluation.max_label_shift=1.1", "max_label_shift=1.1"),
        ("data.allow_new_labels=1", "allow_new_labels=1"),
        ("export.opset=19", "opset=19"),
        ("export.precisions=['int8']", "precisions=['int8']"),
        ("export.precisions=['float32', 'int4']", "precisions='int4'"),
        ("export.text_signature=1", "text_signature=1"),
        ("publish.keep_versions=0", "keep_versions=0"),
        ("training=5", "training=5"),
    ],
)
def test_values_out_of_range(refuse, override, received):
    message = refuse(overrides=[override])
    assert f"Received: {received}" in message
    assert override.partition("=")[0] in message


@pytest.mark.parametrize(
    ("overrides", "received"),
    [
        (["model.position=rope", "model.d_model=24"], "d_model=24, num_heads=8"),
        (["model.position=rope", "model.attention=linear"], "position='rope'"),
        (["model.position=alibi", "model.attention=linear"], "position='alibi'"),
        (["model.num_experts=2", "model.top_k=3"], "num_experts=2, top_k=3"),
        (["model.pooling=cls", "model.attention=local"], 'use "local_global"'),
        (["model.num_kv_heads=2", "export.precisions=['float32', 'ort']"], "num_kv_heads=2"),
        (["model.position=alibi", "export.precisions=['float32', 'ort']"], "position='alibi'"),
        (["model.attention=local", "export.precisions=['float32', 'ort']"], "attention='local'"),
        (["model.max_length=1025", "export.precisions=['float32', 'ort']"], "max_length=1025"),
    ],
)
def test_options_that_do_not_go_together(refuse, overrides, received):
    assert received in refuse(overrides=overrides)


def test_a_class_weight_is_refused_by_its_label(refuse):
    message = refuse(overrides=["training.class_weights={good=1.0, bad=0.0}"])
    assert "training.class_weights.bad: input should be greater than 0. Received: bad=0.0" in message


def test_class_weights_of_another_kind_are_told_of_tables(refuse):
    for value, received in (("2", "2"), ("even", "'even'"), ("true", "True"), ("[1.0]", "[1.0]")):
        message = refuse(overrides=[f"training.class_weights={value}"])
        assert 'training.class_weights must be "none", "balanced" or a table of a number for each label' in message
        assert message.endswith(f"{{ bad = 2.0 }}. Received: class_weights={received}.")


def test_one_way_of_subword_regularization(refuse):
    message = refuse(overrides=["training.subword_regularization=0.3", "training.subword_sampling=0.5"])
    assert "set one of them to 0. Received: subword_regularization=0.3, subword_sampling=0.5" in message


def test_case_folding_belongs_to_the_model_that_is_given(refuse):
    message = refuse(overrides=["tokenizer.model_file=own.model", "tokenizer.case_folding=true"])
    assert message.endswith("leave one of the two out. Received: model_file='own.model', case_folding=True.")


# Recipes.

SMALL = MINIMAL + '[training]\nrecipe = "small-data"\n'


def flat(job):
    return {(s, k): v for s, keys in job.resolved().items() if isinstance(keys, dict) for k, v in keys.items()}


def test_every_recipe_is_a_valid_one_and_all_of_it_is_in_the_resolved_job(load):
    assert JobConfig.model_fields["training"].annotation.model_fields["recipe"].annotation.__args__ == tuple(RECIPES)
    defaults = flat(load())
    for name, recipe in RECIPES.items():
        job = load(overrides=[f"training.recipe={name}"])
        values = {(section, key): value for section, keys in recipe.items() for key, value in keys.items()}
        assert flat(job) == {**defaults, **values, ("training", "recipe"): name}
        assert JobConfig.model_validate(job.resolved()) == job
    assert load(SMALL) == job


def test_what_a_job_sets_wins_over_its_recipe(load):
    job = load(SMALL + "epochs = 3\n[model]\nd_model = 64\n", ["tokenizer.vocab_size=500", "model.num_layers=4"])
    own = {
        ("training", "epochs"): 3, ("model", "d_model"): 64, ("tokenizer", "vocab_size"): 500,
        ("model", "num_layers"): 4,
    }  # fmt: skip
    assert flat(job) == {**flat(load(SMALL)), **own}
    assert load(SMALL, ["training.recipe=reference"]) == load()


def test_a_recipe_leaves_the_users_own_tokenizer_alone(load):
    job = load(SMALL, ["tokenizer.model_file=own.model"])
    assert job.tokenizer == load(overrides=["tokenizer.model_file=own.model"]).tokenizer
    assert job.model == load(SMALL).model


def test_errors_name_the_recipe_that_half_of_the_values_come_from(refuse):
    hint = 'What the job does not set comes from training.recipe = "small-data"; see pipeline/recipes.py.'
    message = refuse(SMALL, ["training.subword_regularization=0.1"])
    assert message.endswith(f"Received: subword_regularization=0.1, subword_sampling=0.5. {hint}")
    assert refuse(SMALL + "[model]\nnum_heads = 3\n").endswith(f"Received: d_model=128, num_heads=3. {hint}")
    for text in (SMALL.replace("small-data", "big"), MINIMAL + "[training]\nrecipe = ['small-data']\n"):
        assert "training.recipe: input should be 'reference' or 'small-data'. Received: recipe=" in refuse(text)
    assert refuse(f"model = 3\n{SMALL}").endswith("'model' must be a section [model]. Received: model=3.")


def test_odd_d_model(refuse):
    assert "d_model must be even" in refuse(overrides=["model.d_model=9", "model.num_heads=3"])


def test_a_missing_key_is_named(refuse):
    assert "key 'data.train' is missing" in refuse('name = "a"\n[data]\n')
    assert "key 'name' is missing" in refuse('[data]\ntrain = "a"\n')
    assert "key 'data' is missing" in refuse('name = "a"\n')


def test_fractions_may_be_zero_when_files_are_named(load):
    job = load(overrides=["data.validation_fraction=0", "data.test_fraction=0", "data.validation=v", "data.test=t"])
    assert (job.data.validation_fraction, job.data.test_fraction) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("model.d_model=64", "model", "d_model", 64),
        ("training.learning_rate=1e-3", "training", "learning_rate", 1e-3),
        ("training.learning_rate=1", "training", "learning_rate", 1.0),
        ("training.class_weights=balanced", "training", "class_weights", "balanced"),
        ("training.class_weights={bad=2.0}", "training", "class_weights", {"bad": 2.0}),
        ("training.class_weights.bad=2", "training", "class_weights", {"bad": 2.0}),
        ("training.class_weights={'so so'=2.0, none=1}", "training", "class_weights", {"so so": 2.0, "none": 1.0}),
        ("export.text_signature=false", "export", "text_signature", False),
        ("export.precisions=['float32']", "export", "precisions", ["float32"]),
        ("evaluation.metric=loss", "evaluation", "metric", "loss"),
        ('evaluation.metric="loss"', "evaluation", "metric", "loss"),
        (" evaluation.metric = loss ", "evaluation", "metric", "loss"),
        ("data.train=a,b.csv", "data", "train", "a,b.csv"),
        ("data.train=['a', 'b']", "data", "train", ["a", "b"]),
        ("data.label_column=2024", "data", "label_column", "2024"),
        ("data.label_column=true", "data", "label_column", "true"),
        ("data.text_column=a=b", "data", "text_column", "a=b"),
        ('data.text_column="a b"', "data", "text_column", "a b"),
        ("data.text_column=评论", "data", "text_column", "评论"),
    ],
)
def test_overrides(load, override, section, key, value):
    assert load(overrides=[override]).resolved()[section][key] == value


def test_the_last_override_wins_and_a_number_can_be_a_name(load):
    job = load(overrides=["name=1", "seed=3", "name=2024", "seed=4"])
    assert (job.name, job.seed) == ("2024", 4)


@pytest.mark.parametrize("override", ["model.d_model", "=3", "model..d_model=3", ".d_model=3", "name.x=3", "", "a.=1"])
def test_malformed_overrides(refuse, override):
    assert refuse(overrides=[override]).startswith("--set ")


def test_an_unknown_override_is_refused(refuse):
    assert "unknown key 'model.d_modle'. Did you mean 'model.d_model'?" in refuse(overrides=["model.d_modle=3"])


def test_unreadable_job_files(tmp_path, refuse):
    with pytest.raises(JobError, match=r"cannot read job file .*absent.toml: No such file or directory"):
        load_job(tmp_path / "absent.toml")
    with pytest.raises(JobError, match="cannot read job file"):
        load_job(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(JobError, match="cannot read job file"):
        load_job(tmp_path / "latin.toml")
    assert "is not valid TOML" in refuse("name = \n")


def test_differences_names_every_leaf():
    old = {"a": 1, "b": {"c": "x", "d": {"e": 1.0}}, "gone": True}
    new = {"a": 1, "b": {"c": "y", "d": {"e": 2.0}}, "added": [1]}
    assert differences(old, new) == ["added: None -> [1]", "b.c: 'x' -> 'y'", "b.d.e: 1.0 -> 2.0", "gone: True -> None"]
    assert differences(old, old) == []


def test_fingerprint():
    assert fingerprint({"a": 1, "b": [2]}, "é") == fingerprint({"b": [2], "a": 1}, "é")
    assert len({fingerprint(1), fingerprint("1"), fingerprint(1, 2), fingerprint([1, 2]), fingerprint()}) == 5
    # printf '[1, {"a": "é"}]' | sha256sum
    assert fingerprint(1, {"a": "é"}) == "ce47ae8896983c34ba44dd9a7d1a1e76559b7a95524a0591e3b15cd37245c0c4"


@pytest.mark.parametrize(
    ("metric", "better", "worse"), [("accuracy", 0.9, 0.8), ("macro_f1", 0.9, 0.8), ("loss", 0.1, 0.2)]
)
def test_is_better(metric, better, worse):
    evaluation = EvaluationConfig(metric=metric)
    assert evaluation.is_better(better, worse)
    assert not evaluation.is_better(worse, better)
    assert not evaluation.is_better(worse, worse)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("work_dir=", "work_dir must name a file or directory. Received: work_dir=''"),
        ("publish.base_path=a\0b", "publish.base_path must name a file or directory. Received: base_path='a\\x00b'"),
        ("tokenizer.model_file=a\0b", "tokenizer.model_file"),
        ('data.train=["a.csv", ""]', "data.train must name a file or directory"),
        ("training.epochs=1000000000", "epochs=1000000000"),
        ("model.d_model=1000000000", "d_model=1000000000"),
        ("name=" + "a" * 300, "at most 100 characters"),
        ("name=\udcff", "--set needs section.key=value"),
        ("x=" + "[" * 100_000, "unknown key 'x'"),
    ],
)
def test_odd_values_are_refused_by_name(refuse, override, expected):
    assert expected in refuse(overrides=[override])


def test_a_byte_order_mark_is_no_error(load):
    assert load("\ufeff" + MINIMAL).name == "movie-reviews"


def test_portable_has_no_absolute_path(load):
    here = load(overrides=["work_dir=runs", "data.train=data/*.csv", "publish.base_path=../models"])
    assert here.portable() == here.resolved()
    there = load(
        overrides=[
            "work_dir=/srv/runs",
            "data.train=['/srv/a/*.csv', 'b.csv']",
            "data.test=/srv/test.csv",
            "tokenizer.model_file=/srv/own.model",
            "training.teacher=['/srv/runs/teacher', 'answers.jsonl']",
            "publish.base_path=/srv/models/",
            "data.text_column=/text",
        ]
    )
    portable = there.portable()
    assert (portable["work_dir"], portable["publish"]["base_path"]) == ("runs", "models")
    assert (portable["data"]["train"], portable["data"]["test"]) == (["*.csv", "b.csv"], "test.csv")
    assert (portable["data"]["validation"], portable["tokenizer"]["model_file"]) == ("", "own.model")
    assert portable["data"]["text_column"] == "/text"
    assert portable["training"] == {**there.resolved()["training"], "teacher": ["teacher", "answers.jsonl"]}
