"""Neural models in the benchmark of events: one budget and one choice of settings for all."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from osciformer.bench.events.models import BenchModel, FitRequest, Fitted
from osciformer.events import EventSequences
from osciformer.events.neural import BlendedEventProcess, EventModelConfig, make_event_model
from osciformer.events.neural.baselines import BASELINE_MODELS
from osciformer.events.neural.blended import companions_of
from osciformer.events.neural.config import EncoderName, HeadName


class NeuralRow(NamedTuple):
    """A row of the table.

    Attributes:
        title: In the table.
        encoder: Name of the encoder.
        head: Name of the head.
        blend_with: As of `OsciFormerEventPredictor`.
    """

    title: str
    encoder: str
    head: str
    blend_with: str | None = None


#: Rows of the table.
ROWS = {
    "osciformer": NeuralRow("OsciFormer, mixture", "osciformer", "mixture"),
    "osciformer_blend": NeuralRow("OsciFormer, blended", "osciformer", "mixture", "auto"),
    "osciformer_softplus": NeuralRow("OsciFormer, softplus", "osciformer", "softplus"),
    "osciformer_decay": NeuralRow("OsciFormer, decay", "osciformer", "decay"),
    "rmtpp": NeuralRow("RMTPP", "rmtpp", "exponential"),
    "rmtpp_blend": NeuralRow("RMTPP, blended", "rmtpp", "exponential", "auto"),
    "rmtpp_mixture": NeuralRow("RMTPP's encoder, mixture", "rmtpp", "mixture"),
    "neural_hawkes": NeuralRow("Neural Hawkes", "neural_hawkes", "softplus"),
    "transformer_hawkes": NeuralRow("Transformer Hawkes", "transformer_hawkes", "decay"),
    "ode_rnn": NeuralRow("ODE-RNN", "ode_rnn", "softplus"),
    "mtan": NeuralRow("mTAN", "mtan", "softplus"),
    "contiformer": NeuralRow("ContiFormer", "contiformer", "softplus"),
}
# What is tried of each network, in this order.
_CHOICES = ("learning_rate", "dropout", "dim")
# Fewest and most epochs.
_EPOCHS = (10, 200)
# Steps that are timed (most, and how many at least), those before them, and seconds after which the
# least will do.
_TIMED, _TIMED_AT_LEAST, _WARM_UP, _LONG = 20, 5, 3, 5.0


@dataclass(frozen=True)
class TrainingSettings:
    """How neural models are trained, all of them alike.

    Attributes:
        learning_rates: Tried one after the other; the best on dev stays.
        dropouts: Each tried with each learning rate, likewise.
        dims: Widths, likewise; None for that of each model.
        num_layers: Blocks; likewise.
        steps: Most steps, about: the number of epochs follows from it, 10 to 200.
        max_epochs: Most epochs, in place of that; None for as many.
        patience: Epochs without a better dev likelihood; None for a fifth of the epochs, at least
            10.
        batch_size: Sequences per step; None for an eighth of them, 8 to 64.
        weight_decay: Weight decay.
        device: `cpu` or `cuda`.
        cell_minutes: After which a training stops with its best epoch so far; None for no limit.
        checkpoints: Folder from which a training that was killed goes on; None for none.
    """

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
    cell_minutes: float | None = None
    checkpoints: str | None = None

    def length(self, num_sequences: int) -> dict[str, Any]:
        """Return batch size, epochs and patience for a number of training sequences.

        Example:
            >>> TrainingSettings().length(2828)
            {'batch_size': 64, 'max_epochs': 45, 'patience': 10}
        """
        batch_size = self.batch_size or min(64, max(8, num_sequences // 8))
        of_epoch = math.ceil(num_sequences / batch_size)
        epochs = min(max(math.ceil(self.steps / of_epoch), _EPOCHS[0]), _EPOCHS[1])
        epochs = self.max_epochs or epochs
        patience = self.patience or max(10, epochs // 5)
        return {"batch_size": batch_size, "max_epochs": epochs, "patience": patience}

    def sizes(self, encoder: str) -> dict[str, Any]:
        """Return width, blocks and heads of an encoder: those of its publication, or given blocks.

        Example:
            >>> TrainingSettings().sizes("contiformer")
            {'dim': 32, 'num_layers': 1, 'num_heads': 4}
        """
        own = BASELINE_MODELS.get(encoder, {})
        names = ("dim", "num_layers", "num_heads")
        found = {name: own.get(name, getattr(EventModelConfig, name)) for name in names}
        if self.num_layers is not None:
            found["num_layers"] = self.num_layers
        return found

    def encoder_options(self, encoder: str) -> dict[str, Any]:
        """Return what makes an encoder faster on the device and changes no more than rounding.

        Example:
            >>> TrainingSettings(device="cuda").encoder_options("contiformer")
            {'fuse': True}
        """
        is_fused = encoder == "contiformer" and self.device.startswith("cuda")
        return {"fuse": True} if is_fused else {}

    @property
    def shared(self) -> dict[str, Any]:
        """Return what decides a result, for the notes of a report."""
        left_out = ("device", "checkpoints")
        return {name: item for name, item in asdict(self).items() if name not in left_out}


def neural_model(name: str) -> BenchModel:
    """Return a neural row by its name, or any other pair as `encoder+head`.

    Example:
        >>> neural_model("osciformer+decay").title
        'osciformer+decay'
    """
    encoder, _, head = name.partition("+")
    row = ROWS.get(name, NeuralRow(name, encoder, head))
    title, encoder, head, _ = row
    if encoder not in get_args(EncoderName) or head not in get_args(HeadName):
        raise ValueError(
            f"there is no neural model {name!r}; known are {', '.join(ROWS)}, and ENCODER+HEAD of "
            f"the encoders {', '.join(get_args(EncoderName))} and the heads "
            f"{', '.join(get_args(HeadName))}"
        )
    return BenchModel(name, title, "neural", partial(fit_neural, row=row))


def fit_neural(request: FitRequest, row: NeuralRow) -> Fitted:
    """Return the network with the best dev likelihood over learning rates, dropouts and widths.

    Args:
        request: What to fit to.
        row: Which network.
    """
    settings: TrainingSettings = request.settings or TrainingSettings()
    rates = request.learning_rates or settings.learning_rates
    best: tuple[float, int, Any] | None = None
    trials = []
    began = time.monotonic()
    own = settings.sizes(row.encoder)["dim"]
    choices = list(itertools.product(rates, settings.dropouts, settings.dims or (own,)))
    for number, choice in enumerate(choices):
        limit = None
        if settings.cell_minutes is not None:
            left = 60 * settings.cell_minutes - (time.monotonic() - began)
            # What a trial leaves over is for those that follow.
            limit = max(1.0, left / (len(choices) - number))
        estimator, hit_limit = _train(request, settings, row, choice, limit)
        found = _dev_likelihood(estimator)
        trials.append(_describe(estimator, choice, found, hit_limit))
        found = found if math.isfinite(found) else -math.inf
        if best is None or found > best[0]:
            best = (found, number, estimator)
    if best is None or not math.isfinite(best[0]):
        raise RuntimeError("no epoch was finished with a finite dev likelihood")
    found, number, estimator = best
    process = estimator.model_.to(settings.device)
    kept = trials[number]
    return Fitted(
        process,
        found,
        parameters=sum(p.numel() for p in process.parameters()),
        chosen={name: kept[name] for name in _CHOICES},
        training={
            **{name: item for name, item in kept.items() if name not in (*_CHOICES, "dev")},
            "fit_seconds": round(sum(trial["fit_seconds"] for trial in trials), 2),
            "trials": trials,
            **settings.length(len(request.train)),
        },
    )


def _train(
    request: FitRequest,
    settings: TrainingSettings,
    row: NeuralRow,
    choice: tuple[float, float, int],
    limit: float | None,
) -> tuple[Any, bool]:
    """Return a trained estimator, and whether the limit in seconds ended its training."""
    from osciformer.estimators import OsciFormerEventPredictor

    rate, dropout, dim = choice
    folder = None
    if settings.checkpoints is not None:
        model = "-".join(part for part in row[1:] if part is not None)
        key = f"{request.task.name}-{model}-{request.seed}-{rate:g}-{dropout:g}-{dim}"
        folder = Path(settings.checkpoints) / key
    estimator = OsciFormerEventPredictor(
        encoder=row.encoder,
        head=row.head,
        blend_with=row.blend_with,
        **settings.sizes(row.encoder) | {"dim": dim},
        encoder_options=settings.encoder_options(row.encoder),
        dropout=dropout,
        learning_rate=rate,
        weight_decay=settings.weight_decay,
        random_state=request.seed,
        accelerator="gpu" if settings.device.startswith("cuda") else "cpu",
        run_dir=folder,
        resume=folder is not None,
        **settings.length(len(request.train)),
    )
    with interrupted_after(limit) as is_over:
        try:
            estimator.fit(request.train, validation_data=request.dev)
        except KeyboardInterrupt:
            if not (is_over() and hasattr(estimator, "model_")):
                raise
    names = companions_of(row.blend_with, request.train.num_types)
    if names and not isinstance(estimator.model_, BlendedEventProcess):
        # The limit is one of training; what it cut short is blended like the rest.
        estimator.model_ = BlendedEventProcess.fit(
            estimator.model_, names, request.train, request.dev
        )
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return estimator, is_over()


def _dev_likelihood(estimator: Any) -> float:
    """Return the dev likelihood of the epoch whose weights were kept; NaN if none was finished."""
    if not 0 <= estimator.best_epoch_ < len(estimator.history_):
        return math.nan
    return float(estimator.history_[estimator.best_epoch_]["val_log_likelihood"])


def _describe(
    estimator: Any, choice: tuple[float, float, int], dev_ll: float, hit_limit: bool
) -> dict[str, Any]:
    seconds = [epoch["seconds"] for epoch in estimator.history_]
    return {
        **dict(zip(_CHOICES, choice, strict=True)),
        "dev": dev_ll,
        "epochs": estimator.n_iter_,
        "best_epoch": estimator.best_epoch_,
        "hit_time_limit": hit_limit,
        "epoch_seconds": statistics.median(seconds) if seconds else None,
        "fit_seconds": round(sum(seconds), 2),
    }


@contextlib.contextmanager
def interrupted_after(seconds: float | None) -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt in the block after some seconds; give a function that says if so.

    Args:
        seconds: How long; None for no limit. It needs the main thread, as signals do.
    """
    if seconds is None:
        yield lambda: False
        return
    is_over = False

    def interrupt(*_: object) -> None:
        nonlocal is_over
        is_over = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield lambda: is_over
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def chosen_rate(path: Path) -> float | None:
    """Return the learning rate that another cell chose, or None where there is no such cell."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return float(found["chosen"]["learning_rate"])
    except (OSError, KeyError, TypeError, ValueError):
        return None


def seconds_per_epoch(
    name: str, train: EventSequences, settings: TrainingSettings
) -> dict[str, float]:
    """Return the time of a training epoch: forward, backward, optimiser, batches prepared before.

    Args:
        name: A neural model.
        train: Training sequences.
        settings: Of training.

    Returns:
        `seconds`, the median time of 5 to 20 steps times the number of steps, after 3 that do
        not count; `steps` of an epoch; `timed` steps.
    """
    fit = neural_model(name).fit
    assert isinstance(fit, partial)
    row: NeuralRow = fit.keywords["row"]
    config = EventModelConfig(
        num_types=train.num_types,
        **settings.sizes(row.encoder),
        dropout=settings.dropouts[0],
        encoder=row.encoder,  # type: ignore[arg-type]
        head=row.head,  # type: ignore[arg-type]
        encoder_options=settings.encoder_options(row.encoder),
    )
    torch.manual_seed(0)
    device = torch.device(settings.device)
    model = make_event_model(config).fit_times(train).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch_size = settings.length(len(train))["batch_size"]
    steps = math.ceil(len(train) / batch_size)
    batches = [batch.to(device) for batch in train.batches(batch_size, shuffle=True)]
    times: list[float] = []
    for number in range(_WARM_UP + min(_TIMED, max(_TIMED_AT_LEAST, steps))):
        if len(times) >= _WARM_UP + _TIMED_AT_LEAST and sum(times) > _LONG:
            break
        batch = batches[number % len(batches)]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    timed = times[_WARM_UP:]
    return {"seconds": statistics.median(timed) * steps, "steps": steps, "timed": len(timed)}
