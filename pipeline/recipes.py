"""Named sets of values, for keys that a job does not set itself."""

RECIPES = {
    "reference": {},  # the defaults
    # For some thousand training texts, of which the reference model remembers every one.
    "small-data": {
        "tokenizer": {
            "vocab_size": 4000,  # each piece is seen more often
            "hard_vocab_limit": False,  # few texts may not have that many
            "case_folding": True,  # "Good" and "good" are learnt together
        },
        "model": {
            "d_model": 128,
            "num_layers": 1,  # more of them remember more and tell no more
            "num_heads": 4,
            "d_ff": 256,
            "dropout": 0.2,
            "head_dropout": 0.3,
            "convolution": 3,  # words and phrases, before anything is compared with anything
            "ngram_pairs": 131072,  # a linear model learns words, pairs and characters from few texts
        },
        "training": {
            "epochs": 25,
            "batch_rows": 64,  # more steps in an epoch
            "batch_tokens": 8192,  # room for as many of longer texts
            "learning_rate": 1e-3,
            "beta_2": 0.98,  # a memory of 50 steps: there are only some thousand
            "weight_decay": 0.05,
            "label_smoothing": 0.1,
            "r_drop": 1.0,  # two passes agree, whatever dropout takes away
            "subword_sampling": 0.5,  # other pieces of the same text in each epoch
            "token_dropout": 0.2,  # no single word decides
            "patience": 0,  # every epoch counts: the learning rate falls to 0 by the last one
        },
    },
}


def with_recipe(values):
    """Returns a job with its recipe's values in the place of the keys that it does not set.

    Where it brings its own tokenizer, what the recipe has for training one is left out.

    Args:
        values: a job as it was read, `{key: value or {key: value}}`, not checked yet; left as it is.
    """
    training, tokenizer = (values.get(section) for section in ("training", "tokenizer"))
    name = training.get("recipe") if isinstance(training, dict) else None
    recipe = dict(RECIPES.get(name, {}) if isinstance(name, str) else {})  # an unknown name is refused with the rest
    if isinstance(tokenizer, dict) and tokenizer.get("model_file"):
        recipe.pop("tokenizer", None)
    sections = {section: values.get(section, {}) for section in recipe}
    # What is no section is refused with the rest, too.
    return values | {s: {**recipe[s], **own} for s, own in sections.items() if isinstance(own, dict)}
