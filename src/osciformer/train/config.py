"""Settings of a training run as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
Accelerator = Literal["auto", "cpu", "gpu"]
Strategy = Literal["auto", "ddp", "fsdp"]

# What may differ between a run and its continuation without changing the result.
FREE_TO_CHANGE = frozenset(
    {"accelerator", "devices", "num_nodes", "num_workers", "strategy", "verbose"}
)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides how a model is trained.

    Attributes:
        max_epochs: Passes over the training series, if early stopping does not end them before.
        batch_size: Series per step, of all processes together.
        learning_rate: Highest learning rate of AdamW.
        weight_decay: Weight decay; spectra, norms and biases have none.
        warmup_fraction: Part of all steps in which the learning rate rises linearly; it then falls
            as a cosine.
        gradient_clip: Bound on the norm of the gradient; None for no bound.
        weight_averaging: Decay of an exponential average of the weights, which is what is validated
            and returned; from 0, for none, to below 1. It spans about `1 / (1 - decay)` steps.
        patience: Epochs without a better validation metric after which training stops; None for no
            early stopping.
        monitor: Validation metric that decides which epoch is best; `auto` asks the task.
        restore_best: Return the weights of the best epoch, not those of the last.
        keep_latest: Take for the best epoch the latest one whose validation metric is worse than
            the best by no more than its standard error. A small validation part cannot tell such
            epochs apart, and the later ones have the smaller learning rates. Training stops when it
            would anyhow.
        precision: `32-true`, `bf16-mixed` or `16-mixed`.
        accelerator: `auto` (a GPU if there is one), `cpu` or `gpu`.
        devices: Processes on each machine; under `torchrun` it decides, and this is not looked at.
        num_nodes: Number of machines; `torchrun` decides here too.
        strategy: `auto` (DDP if there are several processes), `ddp` or `fsdp`.
        num_workers: Processes that prepare batches in the background; 0 for none.
        seed: Decides the order of batches and all randomness of training.
        verbose: 0 prints nothing, 1 shows a progress bar, 2 prints a line per epoch.

    Example:
        >>> config = TrainConfig(max_epochs=3)
        >>> TrainConfig.from_dict(config.to_dict()) == config
        True
    """

    max_epochs: int = 15
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    warmup_fraction: float = 0.1
    gradient_clip: float | None = 1.0
    weight_averaging: float = 0.0
    patience: int | None = 5
    monitor: str = "auto"
    restore_best: bool = True
    keep_latest: bool = False
    precision: Precision = "32-true"
    accelerator: Accelerator = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: Strategy = "auto"
    num_workers: int = 0
    seed: int = 0
    verbose: int = 0

    def __post_init__(self) -> None:
        for name in ("max_epochs", "batch_size", "devices", "num_nodes"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("weight_decay", "num_workers", "seed", "verbose"):
            self._check(name, getattr(self, name) >= 0, "not negative")
        self._check("learning_rate", 0 < self.learning_rate < float("inf"), "positive and finite")
        self._check("warmup_fraction", 0 <= self.warmup_fraction < 1, "from 0 to below 1")
        self._check(
            "gradient_clip",
            self.gradient_clip is None or self.gradient_clip > 0,
            "positive or None",
        )
        self._check("weight_averaging", 0 <= self.weight_averaging < 1, "from 0 to below 1")
        self._check("patience", self.patience is None or self.patience >= 1, "at least 1, or None")
        for name, allowed in (
            ("precision", get_args(Precision)),
            ("accelerator", get_args(Accelerator)),
            ("strategy", get_args(Strategy)),
        ):
            self._check(
                name, getattr(self, name) in allowed, f"one of {', '.join(map(repr, allowed))}"
            )

    def _check(self, name: str, is_good: bool, wanted: str) -> None:
        if not is_good:
            raise ValueError(f"{name} must be {wanted}; got {getattr(self, name)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration that `to_dict` wrote; an unknown key is an error."""
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(allowed))
        if unknown:
            raise ValueError(f"unknown settings {unknown}; allowed: {', '.join(allowed)}")
        return cls(**settings)

    def conflicts(self, other: Mapping[str, Any]) -> list[str]:
        """Return, in words, which settings of another run would give another result.

        Args:
            other: What `to_dict` gave for the other run; what it lacks, as an older version did not
                know it, had the default.

        Example:
            >>> TrainConfig(seed=1).conflicts(TrainConfig(seed=2, verbose=1).to_dict())
            ['seed was 2, is 1']
        """
        mine = {name: v for name, v in self.to_dict().items() if name not in FREE_TO_CHANGE}
        return differences({**TrainConfig().to_dict(), **other}, mine)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return, in words, which settings have another value; those that one side lacks are left out.

    Example:
        >>> differences({"dropout": 0.3, "dim": 8}, {"dropout": 0.1, "dim": 8, "skip": True})
        ['dropout was 0.3, is 0.1']
    """
    return [
        f"{name} was {before[name]!r}, is {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    ]
