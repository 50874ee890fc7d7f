"""Every setting of a run: its name in a YAML file, its flag, its kind and its meaning.

The table repeats names and defaults of the estimators so that `--help` need not import them; a test
holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["whole", "number", "switch", "text", "texts", "numbers", "mapping"]

TASKS = ("classification", "regression", "forecasting", "imputation", "events")
SERIES_TASKS = TASKS[:2]
QUERY_TASKS = TASKS[2:4]
# Those whose tables hold values at times; events have a type instead.
VALUE_TASKS = TASKS[:4]
EVENTS = TASKS[4:]
COLUMNS, MODEL, TRAINING, PROCESSES = "Table", "Model", "Training", "Processes"


@dataclass(frozen=True)
class Setting:
    """A setting.

    Attributes:
        name: Key in a YAML file; the flag has hyphens in place of underscores.
        kind: What its value is: one of `Kind`.
        help: What it means.
        default: What holds if it is not given.
        is_optional: Whether `none` is allowed.
        is_automatic: Whether `auto` is allowed where a number is wanted.
        tasks: Tasks that it belongs to.
        parameter: Name in Python, if it is another one.
        short: A further flag.
        panel: Where `--help` shows it.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    is_optional: bool = False
    tasks: tuple[str, ...] = TASKS
    parameter: str = ""
    short: str = ""
    panel: str = ""
    is_automatic: bool = False

    @property
    def flag(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def python_name(self) -> str:
        """The name of the argument in Python."""
        return self.parameter or self.name


def _in_panel(panel: str, *settings: Setting) -> tuple[Setting, ...]:
    return tuple(replace(setting, panel=panel) for setting in settings)


def _automatic(name: str, help: str, **others: Any) -> Setting:
    return Setting(name, "whole", help, "auto", is_automatic=True, **others)


def _column(name: str, kind: Kind, help: str, **others: Any) -> Setting:
    return Setting(name, kind, help, is_optional=True, **others)


TABLE_SETTINGS = _in_panel(
    COLUMNS,
    _column("table", "text", "The table to train on."),
    _column("id", "text", "Column that says which series a row belongs to."),
    _column("time", "text", "Column of times."),
    _column(
        "target",
        "texts",
        "Column to predict, constant within a series (several, with commas, for regression). For "
        "forecasting and imputation: features to predict, all if not given.",
        parameter="label",
        tasks=VALUE_TASKS,
    ),
    _column(
        "features",
        "texts",
        "Feature columns, or variables; all if not given.",
        parameter="values",
        tasks=VALUE_TASKS,
    ),
    _column(
        "static",
        "texts",
        "Columns (or variables) with one value per series; --labels may hold them, too.",
        tasks=VALUE_TASKS,
    ),
    _column(
        "variable",
        "text",
        "Column of names, for tables of (id, time, variable, value).",
        tasks=VALUE_TASKS,
    ),
    _column("value", "text", "Column of values, for such tables.", tasks=VALUE_TASKS),
    _column(
        "type",
        "text",
        "Column of the types of events: text, or integers from 0; none if all are of one type.",
        tasks=EVENTS,
    ),
    _column(
        "num_types",
        "whole",
        "Number of types that are integers, if the table lacks some that others have.",
        tasks=EVENTS,
    ),
    _column(
        "start", "text", "Column that says where observation of a sequence began.", tasks=EVENTS
    ),
    _column("end", "text", "Column that says where it ended.", tasks=EVENTS),
    _column("time_unit", "text", "Name of the unit of times that are numbers.", tasks=EVENTS),
    _column(
        "labels", "text", "Another table, a row per series, with the target.", tasks=VALUE_TASKS
    ),
    _column(
        "labels_id",
        "text",
        "Its column of ids, if not called as in the table.",
        tasks=VALUE_TASKS,
    ),
    _column("validation", "text", "Table for early stopping, in place of a part of the table."),
    _column(
        "stream",
        "switch",
        "Read Parquet from disk in each epoch; large files always are.",
        tasks=VALUE_TASKS,
    ),
    Setting("unit", "text", "Unit of dates: ns, us, ms, s, min, h or d.", "s"),
    Setting("origin", "text", "Where time 0 is: auto, series or absolute.", "auto"),
    _column("time_format", "text", "How to read times that are text: iso, or as of strptime."),
    _column(
        "duplicates",
        "text",
        "Values at equal times: error, mean, last or keep. Events at equal times: keep or error.",
    ),
    Setting(
        "empty",
        "text",
        "Series without values: error, drop or keep.",
        "error",
        tasks=VALUE_TASKS,
    ),
)

MODEL_SETTINGS = _in_panel(
    MODEL,
    Setting("dim", "whole", "Width of the model; 64 for forecasting, imputation and events.", 32),
    Setting("num_layers", "whole", "Number of encoder blocks; 1 for events.", 2),
    Setting(
        "num_heads",
        "whole",
        "Number of heads; 2 for forecasting and imputation, 4 for events.",
        1,
    ),
    Setting("dropout", "number", "Dropout; 0.1 for forecasting, imputation and events.", 0.2),
    Setting(
        "observation_dropout",
        "number",
        "Part of the values hidden in training; 0 for forecasting and imputation.",
        0.2,
        tasks=VALUE_TASKS,
    ),
    Setting(
        "carry",
        "switch",
        "Show the last known values and their ages too.",
        True,
        tasks=VALUE_TASKS,
    ),
    Setting(
        "backbone", "text", "osciformer, transformer or gru_d.", "osciformer", tasks=VALUE_TASKS
    ),
    Setting(
        "backbone_options",
        "mapping",
        "Further settings of it, as JSON.",
        None,
        True,
        tasks=VALUE_TASKS,
    ),
    Setting(
        "encoder",
        "text",
        "What reads the history of events: osciformer, or a baseline.",
        "osciformer",
        tasks=EVENTS,
    ),
    Setting(
        "encoder_options", "mapping", "Further settings of it, as JSON.", None, True, tasks=EVENTS
    ),
    Setting(
        "head",
        "text",
        "What makes rates of events: mixture, softplus, decay or exponential.",
        "mixture",
        tasks=EVENTS,
    ),
    Setting("num_components", "whole", "Components of the mixture.", 16, tasks=EVENTS),
    Setting(
        "blend_with",
        "texts",
        "Classical processes to blend the network with: of renewal, repeat, hawkes; auto or none.",
        None,
        True,
        tasks=EVENTS,
    ),
    Setting(
        "scaling",
        "text",
        "Of values: asinh, standard, robust or none; standard for forecasting and imputation.",
        "asinh",
        tasks=VALUE_TASKS,
    ),
    Setting("clip", "number", "Bound on scaled inputs, or none.", 6.0, True, tasks=VALUE_TASKS),
    Setting(
        "pool",
        "texts",
        "How states become one: of last, mean, max.",
        ("last", "mean", "max"),
        tasks=SERIES_TASKS,
    ),
    Setting("skip", "switch", "Show summaries to the head.", True, tasks=SERIES_TASKS),
    Setting(
        "statistics",
        "texts",
        "Which: of last, mean, min, max, rise, count, std, age, first.",
        ("last", "mean", "min", "max", "rise", "count", "std", "age", "first"),
        tasks=SERIES_TASKS,
    ),
    Setting(
        "foresight",
        "number",
        "Weight of predicting the next measurements as a second aim of training.",
        0.0,
        tasks=SERIES_TASKS,
    ),
    Setting(
        "quantiles",
        "numbers",
        "Levels to predict, with 0.5 among them.",
        (0.05, 0.25, 0.5, 0.75, 0.95),
        tasks=QUERY_TASKS,
    ),
    Setting("covariates", "texts", "Features not to predict.", (), tasks=QUERY_TASKS),
    Setting(
        "known_covariates",
        "texts",
        "Features known ahead, not to predict.",
        (),
        tasks=("forecasting",),
    ),
    Setting(
        "horizon",
        "number",
        "How far to look ahead; a quarter of a typical series if not given.",
        None,
        True,
        tasks=("forecasting",),
    ),
    Setting("hidden_fraction", "number", "Part hidden in training.", 0.2, tasks=("imputation",)),
)

TRAINING_SETTINGS = _in_panel(
    TRAINING,
    Setting("seed", "whole", "Decides all that is random.", 0, parameter="random_state"),
    _automatic("max_epochs", "Most passes over the data: a number, or auto.", short="--epochs"),
    _automatic("batch_size", "Series per step: a number, or auto."),
    Setting(
        "learning_rate",
        "number",
        "Highest learning rate; 0.002 for forecasting, imputation and events.",
        1e-3,
    ),
    Setting("weight_decay", "number", "Weight decay.", 0.02),
    Setting("warmup_fraction", "number", "Part of the steps that warm up.", 0.1),
    Setting("gradient_clip", "number", "Bound on the gradient's norm, or none.", 1.0, True),
    Setting(
        "weight_averaging",
        "number",
        "Decay of an average of the weights, kept in their place; 0, none, for forecasting, "
        "imputation and events.",
        0.99,
    ),
    Setting("validation_fraction", "number", "Part kept for early stopping.", 0.1),
    _automatic("patience", "Epochs without improvement: a number, auto or none.", is_optional=True),
    Setting("monitor", "text", "Metric that picks the best epoch.", "auto"),
    Setting(
        "keep_latest", "switch", "Keep the latest epoch within a standard error of the best.", False
    ),
    Setting(
        "class_weight",
        "mapping",
        "none, balanced, or weights by class as JSON.",
        None,
        True,
        tasks=("classification",),
    ),
    Setting("label_smoothing", "number", "Of the classes.", 0.0, tasks=("classification",)),
    Setting("criterion", "text", "huber or mse.", "huber", tasks=("regression",)),
)

PROCESS_SETTINGS = _in_panel(
    PROCESSES,
    Setting("precision", "text", "32-true, bf16-mixed or 16-mixed.", "32-true"),
    Setting("accelerator", "text", "auto, cpu or gpu.", "auto"),
    Setting("devices", "whole", "Processes on each machine.", 1),
    Setting("num_nodes", "whole", "Number of machines.", 1),
    Setting("strategy", "text", "auto, ddp or fsdp.", "auto"),
    Setting("num_workers", "whole", "Processes that prepare batches.", 0),
)

TASK_SETTING = Setting("task", "text", f"What to train: {', '.join(TASKS)}.", panel=COLUMNS)
ESTIMATOR_SETTINGS = (*MODEL_SETTINGS, *TRAINING_SETTINGS, *PROCESS_SETTINGS)
SETTINGS = {
    setting.name: setting for setting in (TASK_SETTING, *TABLE_SETTINGS, *ESTIMATOR_SETTINGS)
}


def flag_names() -> dict[str, str]:
    """Return the flag of each argument in Python.

    Example:
        >>> flag_names()["random_state"], flag_names()["max_epochs"]
        ('--seed', '--max-epochs')
    """
    return {setting.python_name: setting.flag for setting in SETTINGS.values()}
