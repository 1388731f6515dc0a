"""Which settings of a job would bring a cost under a limit, each by the formulas of `pipeline.cost`."""

import dataclasses
import json

from pipeline import dataset
from pipeline.config import JobConfig
from pipeline.cost import formulas
from pipeline.identity import read_record
from pipeline.text import Tokenizer

_ASSUMED_CLASSES = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A job, and what its data tell about the sizes of its model."""

    config: JobConfig
    vocab_size: int
    num_classes: int
    is_prepared: bool

    @classmethod
    def of(cls, config):
        """Returns those of a job, whose data need not be prepared.

        A trained tokenizer has just the size asked for; without `hard_vocab_limit` only the data tell.
        """
        tokenizer = config.tokenizer
        report = read_record(config.run_dir / "data" / dataset.REPORT, "splits", "vocab_size")
        vocab_size = tokenizer.vocab_size
        if tokenizer.model_file:
            vocab_size = Tokenizer.load(tokenizer.model_file).vocab_size
        elif report and not tokenizer.hard_vocab_limit:
            vocab_size = report["vocab_size"]
        num_classes = len(report["splits"]["train"]["labels"]) if report else _ASSUMED_CLASSES
        return cls(config, vocab_size, num_classes, report is not None)

    def changed(self, settings):
        """Returns these with other `settings` {section: {key: value}}; None where they do not fit the rest."""
        values = self.config.model_dump()
        for section, keys in settings.items():
            values[section] |= keys
        try:
            return dataclasses.replace(self, config=JobConfig.model_validate(values))
        except ValueError:
            return None

    @property
    def parameters(self):
        """{part: count}."""
        return formulas.parameters(self.config.model, self.vocab_size, self.num_classes)

    @property
    def step_parameters(self):
        """How many of them a training step changes."""
        return sum(count for part, count in self.parameters.items() if part != formulas.NGRAMS)

    def multiply_adds(self, length):
        """Of one text, forward."""
        return sum(formulas.multiply_adds(self.config.model, length, self.num_classes).values())

    def activation_memory(self, length):
        """Bytes that a training step keeps for its backward pass."""
        return sum(formulas.activation_memory(self.config.model, self.config.training, length).values())

    def step_memory(self, length):
        """Bytes that a training step adds to what lies in memory between steps."""
        count = self.step_parameters
        return sum(formulas.step_memory(self.config.model, self.config.training, length, count).values())

    def training_memory(self, length):
        """{term: bytes} of a training step's peak."""
        return formulas.training_memory(self.config.model, self.config.training, length, self.step_parameters)

    def inference_memory(self, length):
        """Bytes of one text's forward pass."""
        return formulas.inference_memory(self.config.model, length, sum(self.parameters.values()))


@dataclasses.dataclass(frozen=True)
class Way:
    """One kind of change: what it costs, and the `settings` that do it, the mildest first."""

    price: str
    settings: list


def ways_to_less_memory(config, length):
    """Returns the `Way`s to a smaller training step, those that cost the model least first."""
    training = config.training
    parts = []
    while formulas.batch_rows(training, length) >= 2 << len(parts):  # a batch holds one text at least
        parts.append(2 << len(parts))
    limits = {"batch_tokens": training.batch_tokens, "batch_rows": training.batch_rows}
    limits = {key: limit for key, limit in limits.items() if limit}
    batches = [
        {**{key: limit // n for key, limit in limits.items()}, "accumulate_batches": training.accumulate_batches * n}
        for n in parts
    ]
    rates = {config.model.dropout, config.model.head_dropout} - {0.0}
    same_rate = [{"model": {"head_dropout": config.model.dropout}}] if len(rates) == 2 else []
    return [
        Way("the same optimizer step in parts", [{"training": keys} for keys in batches]),
        Way("one table of dropout masks less", same_rate),
        Way("a third more multiply-adds", [] if training.recompute else [{"training": {"recompute": True}}]),
        *ways_to_less_work(config, length),
    ]


def ways_to_less_work(config, length):
    """Returns the `Way`s to fewer multiply-adds for a text, those that cost the model least first."""
    model = config.model
    widths = [model.window >> n for n in range(3)]
    narrower = "local_global" if model.pooling == "cls" else "local"  # a class vector is to see the whole text
    local = [
        {"attention": narrower if model.attention == "full" else model.attention, "window": window}
        for window in widths
        if 3 * window < length and (model.attention == "full" or window < model.window)
    ]
    shared = [{"num_kv_heads": 1}] if model.num_kv_heads != 1 and model.num_heads > 1 else []
    layers = [{"num_layers": n} for n in _halves(model.num_layers)]
    narrow = [{"d_model": model.d_model >> n, "d_ff": model.d_ff >> n} for n in (1, 2)]
    in_model = {
        "tokens see their neighbours only": [] if model.attention == "linear" else local,
        "heads share their keys and values": shared,
        "a shallower model, which may learn less": layers,
        "a narrower model, which may learn less": narrow,
    }
    return [Way(price, [{"model": keys} for keys in settings]) for price, settings in in_model.items()]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Settings, the figure that a job has with them, and what they cost."""

    settings: dict
    figure: float
    price: str


def remedies(sizes, ways, figure, limit):
    """Returns a `Remedy` for each way that suffices alone, with its mildest settings that do.

    Args:
        sizes: a `Sizes`.
        ways: `Way`s, in the order of the answer.
        figure: maps `Sizes` to the figure.
        limit: the highest figure that is good.
    """
    found = []
    for way in ways:
        for settings in way.settings:
            changed = sizes.changed(settings)
            if changed is not None and figure(changed) <= limit:
                found.append(Remedy(settings, figure(changed), way.price))
                break
    return found


def remedy_of_all(sizes, ways, figure, limit):
    """Returns the `Remedy` of the first ways together, as many as it takes; of all if they don't suffice either.

    Arguments as of `remedies`.
    """
    best, prices = Remedy({}, figure(sizes), ""), []
    for way in ways:
        for settings in way.settings:
            tried = _merged(best.settings, settings)
            changed = sizes.changed(tried)
            if changed is not None and figure(changed) < best.figure:
                prices += [] if way.price in prices else [way.price]
                best = Remedy(tried, figure(changed), "; ".join(prices))
            if best.figure <= limit:
                return best
    return best


def describe(settings):
    """Returns settings as `--set` and the job file name them, e.g. "model.window = 64"."""
    pairs = [(f"{section}.{key}", value) for section, keys in settings.items() for key, value in keys.items()]
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in pairs)


def _halves(number):
    return [number >> n for n in range(1, number.bit_length())]


def _merged(settings, more):
    sections = settings.keys() | more.keys()
    return {section: settings.get(section, {}) | more.get(section, {}) for section in sections}
