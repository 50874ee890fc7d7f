"""Models of the benchmark of events: one table; the dev part alone decides their settings."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from osciformer._text import did_you_mean
from osciformer.baselines import BASELINE_MODELS
from osciformer.bench.events.datasets import EventTask
from osciformer.bench.speed import milliseconds
from osciformer.config import HeadName, estimator_arguments
from osciformer.events import EventProcess, EventSequences, PoissonProcess, log_likelihood
from osciformer.events.classical import NUM_BINS, MarkRule, choose_hawkes, choose_renewal
from osciformer.events.neural import BlendedEventProcess, EventModelConfig, make_event_model
from osciformer.events.neural.blended import companions_of
from osciformer.models.backbones import backbone_names

_CHOICES = ("learning_rate", "dropout", "dim")  # what is tried of each network, in this order
# Steps that are timed, at most and at least, those before, and seconds after which few are enough.
_TIMED, _TIMED_AT_LEAST, _WARM_UP, _LONG = 20, 5, 3, 5.0


@dataclass(frozen=True)
class TrainingSettings:
    """How neural models are trained, all of them alike; the command line says what None means."""

    # Each is tried with each dropout and width, and the best on dev is kept.
    learning_rates: tuple[float, ...] = (3e-3, 1e-3)
    dropouts: tuple[float, ...] = (0.1,)
    dims: tuple[int, ...] | None = None
    num_layers: int | None = None
    steps: int = 2000
    max_epochs: int | None = None
    patience: int | None = None
    batch_size: int | None = None
    weight_decay: float = 0.1
    device: str = "cpu"
    cell_minutes: float | None = None  # after which a training stops with its best epoch so far
    checkpoints: str | None = None  # folder from which a training that was killed is continued

    def length(self, num_sequences: int) -> dict[str, Any]:
        """Return batch size, epochs and patience for a number of training sequences."""
        batch_size = self.batch_size or min(64, max(8, num_sequences // 8))
        wanted = math.ceil(self.steps / math.ceil(num_sequences / batch_size))
        epochs = self.max_epochs or min(max(wanted, 10), 200)
        patience = self.patience or max(10, epochs // 5)
        return {"batch_size": batch_size, "max_epochs": epochs, "patience": patience}

    def model_options(self, encoder: str) -> dict[str, Any]:
        """Return the sizes of an encoder's publication, or given blocks, and what makes it fast."""
        own = BASELINE_MODELS.get(encoder, {})
        names = ("dim", "num_layers", "num_heads")
        found = {name: own.get(name, getattr(EventModelConfig, name)) for name in names}
        found["num_layers"] = self.num_layers or found["num_layers"]
        # Fused, it differs by rounding alone.
        is_fused = encoder == "contiformer" and self.device.startswith("cuda")
        return found | {"encoder_options": {"fuse": True} if is_fused else {}}


class FitRequest(NamedTuple):
    """What a model may use; test data are not among it."""

    task: EventTask
    train: EventSequences
    dev: EventSequences
    seed: int
    settings: TrainingSettings = TrainingSettings()


class Fitted(NamedTuple):
    """A process, and what the dev part says of it."""

    process: EventProcess
    dev_ll: float  # per event
    parameters: int
    chosen: Mapping[str, Any] = {}  # by dev
    training: Mapping[str, Any] = {}  # further entries of the cell


class Network(NamedTuple):
    """Encoder, head and companions of a neural row, as of `OsciFormerEventPredictor`."""

    encoder: str
    head: str
    blend_with: str | None = None


@dataclass(frozen=True)
class BenchModel:
    """A row of the table."""

    name: str
    title: str
    kind: Literal["truth", "rule", "trivial", "classical", "neural"]
    fit: Callable[[FitRequest], Fitted] | None  # None of a rule of `horizon`, which only forecasts
    is_about_types: bool = False  # differs from another row only if there are several types
    network: Network | None = None

    @property
    def is_random(self) -> bool:
        """Whether another seed gives another model."""
        return self.kind == "neural"


def fit_truth(request: FitRequest) -> Fitted:
    """Return the process that made the events."""
    assert request.task.truth is not None  # else it has no cell
    process = request.task.truth()
    return Fitted(process, log_likelihood(process, request.dev).micro, parameters=0)


def fit_poisson(request: FitRequest) -> Fitted:
    """Return constant rates; half an event more of each type, so that none is impossible."""
    process = PoissonProcess.fit(request.train, smoothing=0.5)
    return Fitted(process, log_likelihood(process, request.dev).micro, process.num_types)


def fit_renewal(request: FitRequest, *, marks: MarkRule, num_bins: tuple[int, ...]) -> Fitted:
    """Return a density of gaps and types by the last one; bins and smoothing are chosen."""
    task, train, dev, *_ = request
    best = choose_renewal(train, dev, marks=marks, num_bins=num_bins, min_width=task.min_width)
    types, bins = best.process.num_types, len(best.process.gaps.mass)
    parameters = bins + 1 + (types * (types - 1) if marks == "markov" else types)
    return Fitted(best.process, best.likelihood, parameters, best.settings)


def fit_hawkes(request: FitRequest) -> Fitted:
    """Return a Hawkes process with exponential kernels; their shape and the steps are chosen."""
    began = time.perf_counter()
    process, likelihood, settings = choose_hawkes(request.train, request.dev)
    training = {"fit_seconds": round(time.perf_counter() - began, 2)}
    size = sum(item.numel() for item in (process.base, process.branching, process.decay))
    return Fitted(process, likelihood, size, settings, training)


def fit_neural(request: FitRequest, *, network: Network) -> Fitted:
    """Return the network with the best dev likelihood over learning rates, dropouts and widths."""
    settings = request.settings
    dims = settings.dims or (settings.model_options(network.encoder)["dim"],)
    choices = list(itertools.product(settings.learning_rates, settings.dropouts, dims))
    process, trials, began = None, [], time.monotonic()
    kept: dict[str, Any] = {"dev": -math.inf}
    for number, choice in enumerate(choices):
        limit = None
        if settings.cell_minutes is not None:
            left = 60 * settings.cell_minutes - (time.monotonic() - began)
            # The time that a trial leaves over is for those that follow.
            limit = max(1.0, left / (len(choices) - number))
        model, trial = _train(request, network, choice, limit)
        trials.append(trial)
        if math.isfinite(trial["dev"]) and trial["dev"] > kept["dev"]:
            process, kept = model, dict(trial)
    if process is None:
        raise RuntimeError("no epoch was finished with a finite dev likelihood")
    chosen, dev_ll = {name: kept.pop(name) for name in _CHOICES}, kept.pop("dev")
    kept["fit_seconds"] = round(sum(trial["fit_seconds"] for trial in trials), 2)
    kept |= {"trials": trials, **settings.length(len(request.train))}
    size = sum(p.numel() for p in process.parameters())
    return Fitted(process.to(settings.device), dev_ll, size, chosen, kept)


def _train(
    request: FitRequest, network: Network, choice: tuple[float, float, int], limit: float | None
) -> tuple[Any, dict[str, Any]]:
    """Return a network, and the entries of its trial; `dev` is NaN if no epoch was finished."""
    from osciformer.estimators import OsciFormerEventPredictor

    settings, folder, chosen = request.settings, None, dict(zip(_CHOICES, choice, strict=True))
    if settings.checkpoints is not None:
        name = "-".join(part for part in network if part is not None)
        tried = "-".join(f"{number:g}" for number in choice)
        folder = Path(settings.checkpoints) / f"{request.task.name}-{name}-{request.seed}-{tried}"
    given = {
        **network._asdict(),
        **settings.model_options(network.encoder),
        **chosen,
        "weight_decay": settings.weight_decay,
        "seed": request.seed,
        "accelerator": "gpu" if settings.device.startswith("cuda") else "cpu",
        **settings.length(len(request.train)),
    }
    estimator = OsciFormerEventPredictor(
        **estimator_arguments("events", given), run_dir=folder, resume=folder is not None
    )
    with interrupted_after(limit) as interruptions:
        try:
            estimator.fit(request.train, validation_data=request.dev)
        except KeyboardInterrupt:
            if not (interruptions and hasattr(estimator, "model_")):
                raise
    model: Any = estimator.model_
    names = companions_of(network.blend_with, request.train.num_types)
    if names and not isinstance(model, BlendedEventProcess):
        # The limit is one of training; a network that it cuts short is blended like the rest.
        model = BlendedEventProcess.fit(model, names, request.train, request.dev)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    history, best = estimator.history_, estimator.best_epoch_
    seconds = [epoch["seconds"] for epoch in history]
    has_best = 0 <= best < len(history)
    return model, {
        **chosen,
        "dev": float(history[best]["val_log_likelihood"]) if has_best else math.nan,
        "epochs": estimator.n_iter_,
        "best_epoch": best,
        "hit_time_limit": bool(interruptions),
        "epoch_seconds": statistics.median(seconds) if seconds else None,
        "fit_seconds": round(sum(seconds), 2),
    }


@contextlib.contextmanager
def interrupted_after(seconds: float | None) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt in the block after some seconds, and then fill the list it gives."""
    interruptions: list[str] = []

    def interrupt(*_: object) -> None:
        interruptions.append("time limit")
        raise KeyboardInterrupt

    if seconds is None:
        yield interruptions
        return
    before = signal.signal(signal.SIGALRM, interrupt)  # in the main thread, as signals need it
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield interruptions
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def seconds_per_epoch(
    network: Network, train: EventSequences, settings: TrainingSettings
) -> dict[str, float]:
    """Return the time of a training epoch without its data loading, its steps, and those timed."""
    device = torch.device(settings.device)
    torch.manual_seed(0)
    options: dict[str, Any] = {"encoder": network.encoder, "head": network.head}
    options |= {**settings.model_options(network.encoder), "dropout": settings.dropouts[0]}
    config = EventModelConfig(num_types=train.num_types, **options)
    model = make_event_model(config).fit_times(train).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch_size = settings.length(len(train))["batch_size"]
    batches = [batch.to(device) for batch in train.batches(batch_size, shuffle=True)]
    steps = math.ceil(len(train) / batch_size)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    times: list[float] = []
    for number in range(_WARM_UP + min(_TIMED, max(_TIMED_AT_LEAST, steps))):
        if len(times) >= _WARM_UP + _TIMED_AT_LEAST and sum(times) > _LONG:
            break
        times.append(milliseconds(partial(step, batches[number % len(batches)]), device) / 1e3)
    timed = times[_WARM_UP:]
    return {"seconds": statistics.median(timed) * steps, "steps": steps, "timed": len(timed)}


def _neural(name: str, title: str, *parts: str) -> BenchModel:
    network = Network(*parts)
    return BenchModel(name, title, "neural", partial(fit_neural, network=network), network=network)


_POISSON_MARKOV = partial(fit_renewal, marks="markov", num_bins=NUM_BINS[:1])
_MARKOV = partial(fit_renewal, marks="markov", num_bins=NUM_BINS)
_REPEAT = partial(fit_renewal, marks="repeat", num_bins=NUM_BINS)
_ROWS = (
    BenchModel("truth", "the process itself", "truth", fit_truth),
    BenchModel("constant", "most frequent type", "rule", None),
    BenchModel("repeat", "the last ten again", "rule", None),
    BenchModel("poisson", "Poisson", "trivial", fit_poisson),
    BenchModel("poisson_markov", "Poisson x Markov", "trivial", _POISSON_MARKOV, True),
    BenchModel("renewal_markov", "renewal x Markov", "trivial", _MARKOV),
    BenchModel("renewal_repeat", "renewal x repeat-last", "trivial", _REPEAT, True),
    BenchModel("hawkes", "Hawkes, fitted", "classical", fit_hawkes),
    _neural("osciformer", "OsciFormer, mixture", "osciformer", "mixture"),
    _neural("osciformer_blend", "OsciFormer, blended", "osciformer", "mixture", "auto"),
    _neural("osciformer_softplus", "OsciFormer, softplus", "osciformer", "softplus"),
    _neural("osciformer_decay", "OsciFormer, decay", "osciformer", "decay"),
    _neural("rmtpp", "RMTPP", "rmtpp", "exponential"),
    _neural("rmtpp_blend", "RMTPP, blended", "rmtpp", "exponential", "auto"),
    _neural("rmtpp_mixture", "RMTPP's encoder, mixture", "rmtpp", "mixture"),
    _neural("neural_hawkes", "Neural Hawkes", "neural_hawkes", "softplus"),
    _neural("transformer_hawkes", "Transformer Hawkes", "transformer_hawkes", "decay"),
    _neural("attnhp", "AttNHP", "attnhp", "softplus"),
    _neural("s2p2", "S2P2", "s2p2", "softplus"),
    _neural("ode_rnn", "ODE-RNN", "ode_rnn", "softplus"),
    _neural("mtan", "mTAN", "mtan", "softplus"),
    _neural("contiformer", "ContiFormer", "contiformer", "softplus"),
)
MODELS = {model.name: model for model in _ROWS}  # in the order of the table


def find_model(name: str) -> BenchModel:
    """Return a model by its name; `encoder+head` for a pair that has no row of its own."""
    if name in MODELS:
        return MODELS[name]
    encoder, _, head = name.partition("+")
    encoders, heads = backbone_names("events"), get_args(HeadName)
    if encoder not in encoders or head not in heads:
        near = did_you_mean(name, MODELS)
        raise ValueError(
            f"there is no model {name!r}; {near + ' ' if near else ''}known are "
            f"{', '.join(MODELS)}, and ENCODER+HEAD of the encoders {', '.join(encoders)} and the "
            f"heads {', '.join(heads)}"
        )
    return _neural(name, name, encoder, head)
