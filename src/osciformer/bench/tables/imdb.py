"""`osciformer bench imdb`: is a film review kind? Words are vectors, found without labels."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from osciformer._optional import need
from osciformer._types import Float
from osciformer.bench.tables.harness import Table
from osciformer.bench.tables.models import Fitted, Model
from osciformer.bench.tables.problem import Part, Problem
from osciformer.data import IrregularSeries
from osciformer.data.download import DATA_VARIABLE

VOCABULARY, LONGEST = 20_000, 200
#: Of both linear models, as in published ones; no grid, so that they are a fixed floor.
STRENGTH = 4.0


class Reviews(NamedTuple):
    """Reviews, those to train on first."""

    texts: tuple[str, ...]
    labels: np.ndarray
    num_train: int


@functools.cache
def read_reviews(folder: str | None) -> Reviews:
    """Return all reviews in random order, from `imdb.parquet` in a folder."""
    path = Path(folder or ".") / "imdb.parquet"
    if folder is None or not path.exists():
        raise FileNotFoundError(
            f"reviews are read from imdb.parquet in the folder that {DATA_VARIABLE} names; it is "
            "not among the data sets that are downloaded"
        )
    columns = ["split", "label", "text"]
    table = need("pyarrow.parquet", extra="data").read_table(path, columns=columns).to_pydict()
    order = np.random.default_rng(0).permutation(len(table["text"]))
    order = order[np.argsort([table["split"][n] != "train" for n in order], kind="stable")]
    texts = tuple(table["text"][n].replace("<br />", " ") for n in order)
    return Reviews(texts, np.array(table["label"])[order], table["split"].count("train"))


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case.

    >>> words_of("Don't miss it: 10/10!")
    ["don't", 'miss', 'it', '10', '10']
    """
    return re.findall(r"[a-z0-9']+", text.lower())


def learn_vectors(texts: Sequence[str], dim: int) -> dict[str, Float[np.ndarray, "D"]]:
    """Return unit vectors of the most frequent words, by latent semantic analysis of texts."""
    counts = Counter(word for text in texts for word in words_of(text))
    words = [word for word, _ in counts.most_common(VOCABULARY)]
    text = need("sklearn.feature_extraction.text", extra="train")
    weigh = text.TfidfVectorizer(tokenizer=words_of, token_pattern=None, vocabulary=words)
    matrix = weigh.fit_transform(texts)
    reduce = need("sklearn.decomposition", extra="train").TruncatedSVD(dim, random_state=0)
    found = reduce.fit(matrix).components_.T
    found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return dict(zip(words, found.astype(np.float32), strict=True))


@functools.cache
def _load(folder: str | None, sizes: tuple[int, int, int], dim: int) -> tuple[Part, Part, Part]:
    """Return the parts; ids say where the texts are."""
    reviews = read_reviews(folder)
    train, validation, test = sizes
    first = [np.arange(train), train + np.arange(validation), reviews.num_train + np.arange(test)]
    vectors = learn_vectors([reviews.texts[n] for n in first[0]], dim)
    parts = []
    for index in first:
        values = []
        for number in index:
            known = [vectors[w] for w in words_of(reviews.texts[number]) if w in vectors]
            values.append(np.array(known[-LONGEST:] or np.zeros((1, dim)), dtype=np.float32))
        times = [np.arange(len(one), dtype=float) for one in values]
        labels = reviews.labels[index]
        parts.append(Part(IrregularSeries.from_arrays(times, values, ids=index, labels=labels)))
    return parts[0], parts[1], parts[2]


def load(case: str, seed: int, size: Mapping[str, Any]) -> Problem:
    """Return the problem; the seed decides nothing but the training."""
    sizes = size["train"], size["validation"], size["test"]
    train, validation, test = _load(os.environ.get(DATA_VARIABLE), sizes, size["vectors"])
    settings = {"max_epochs": size["epochs"], "batch_size": size["batch"], "dim": size["dim"]}
    return Problem("classification", train, validation, {"test": test}, settings)


def _tfidf(cut: Callable[[str], str], **settings: Any) -> Model:
    def fit(problem: Problem, chosen: Mapping[str, Any], seed: int) -> Fitted:
        reviews = read_reviews(os.environ.get(DATA_VARIABLE))
        text = need("sklearn.feature_extraction.text", extra="train")
        regression = need("sklearn.linear_model", extra="train").LogisticRegression
        model = need("sklearn.pipeline", extra="train").make_pipeline(
            text.TfidfVectorizer(tokenizer=words_of, token_pattern=None, **settings),
            regression(C=STRENGTH, max_iter=1000),
        )

        def texts(part: Part) -> list[str]:
            return [cut(reviews.texts[number]) for number in part.series.ids]

        model.fit(texts(problem.train), problem.train.truth)
        return Fitted(lambda part: np.asarray(model.predict(texts(part))), {})

    return Model(fit, tasks=("classification",))


SUITE = Table(
    name="imdb",
    module="imdb",
    summary="Is a film review kind?",
    rows=("imdb",),
    load=load,
    tasks="classification",
    sizes={
        "small": {
            **{"train": 3000, "validation": 1000, "test": 5000, "vectors": 32},
            **{"epochs": 8, "batch": 32, "dim": 32},
        },
        "full": {
            **{"train": 22_500, "validation": 2500, "test": 25_000, "vectors": 64},
            **{"epochs": 20, "batch": 64, "dim": 64},
        },
        "quick": {
            **{"train": 24, "validation": 12, "test": 12, "vectors": 4},
            **{"epochs": 1, "batch": 8, "dim": 8},
        },
    },
    own={
        "tfidf": _tfidf(lambda text: text, ngram_range=(1, 2), max_features=200_000),
        "tfidf_words": _tfidf(
            lambda text: " ".join(words_of(text)[-LONGEST:]), max_features=VOCABULARY
        ),
    },
    note=(
        "The last 200 known words of a review, a row each. The estimators take numbers, not words: "
        "a word is a vector from latent semantic analysis of the training texts, without labels, "
        "which is not trained further (published models train theirs). `tfidf` is logistic "
        "regression on words and pairs of the whole text, `tfidf_words` on the last 200 words."
    ),
    published={
        ("imdb", name): figure
        for name, figure in {
            "osciformer_paper": "93.3 ± 0.2",
            "lstm": "87.3 ± 0.4",
            "gru": "86.2",
            "lmu": "87.7 ± 0.1",
            "cornn": "86.7 ± 0.3",
            "ltc": "61.8 ± 6.1",
            "cfc": "85.9 ± 0.9",
        }.items()
    },
    source=(
        "25,000 reviews, trained vectors, without a validation part; CfC paper (arXiv 2106.13898), "
        "and `osciformer_paper` as printed in the OsciFormer paper, which gives no recipe"
    ),
)
