"""Published models to compare with, written from scratch.

They are backbones of series and encoders of events. Importing this package registers them by their
names. The rest of osciformer does not need it.

Series: `transformer`, `contiformer`, `gru_d`, and recurrent networks of one layer, each a `Cell` in
a `RecurrentBackbone`:

- with gates: `lstm`, `gru` (the gap is an input), `rnn_decay`, `ct_lstm`, `phased_lstm`;
- with a linear memory: `ct_gru`, `lmu`;
- along a differential equation: `ode_rnn`, `ode_lstm`, `ct_rnn`, `gru_ode`, `cornn`;
- liquid: `ltc`, `cfc`.

Further series models: `neural_cde`, `log_ncde`, `mtan`, `rough_transformer`, and the state spaces
`lru`, `s5`, `linoss`, `mamba`.

Events: `rmtpp, neural_hawkes, transformer_hawkes, attnhp, s2p2, ode_rnn, mtan, contiformer`.

`BASELINE_MODELS` has the settings with which an event encoder is the published model:

>>> from osciformer.events.neural import EventModelConfig, make_event_model
>>> config = EventModelConfig(num_types=3, **BASELINE_MODELS["neural_hawkes"])
>>> make_event_model(config).num_types
3
"""

from typing import Any

from osciformer.baselines.attentive_hawkes import AttentiveHawkesEncoder as AttentiveHawkesEncoder
from osciformer.baselines.attentive_hawkes import HawkesAttention as HawkesAttention
from osciformer.baselines.contiformer import ContiFormerAttention as ContiFormerAttention
from osciformer.baselines.contiformer import ContiFormerBackbone as ContiFormerBackbone
from osciformer.baselines.contiformer import ContiFormerEventEncoder as ContiFormerEventEncoder
from osciformer.baselines.contiformer import VectorField as VectorField
from osciformer.baselines.contiformer import contiformer_attention as contiformer_attention
from osciformer.baselines.controlled import LogNeuralCDE as LogNeuralCDE
from osciformer.baselines.controlled import NeuralCDE as NeuralCDE
from osciformer.baselines.event_encoders import (
    ContinuousTimeLSTMEncoder as ContinuousTimeLSTMEncoder,
)
from osciformer.baselines.event_encoders import (
    MultiTimeAttentionEncoder as MultiTimeAttentionEncoder,
)
from osciformer.baselines.event_encoders import ODERNNEncoder as ODERNNEncoder
from osciformer.baselines.event_encoders import RecurrentEventEncoder as RecurrentEventEncoder
from osciformer.baselines.gated_cells import AugmentedLSTM as AugmentedLSTM
from osciformer.baselines.gated_cells import ContinuousTimeLSTM as ContinuousTimeLSTM
from osciformer.baselines.gated_cells import DecayingCells as DecayingCells
from osciformer.baselines.gated_cells import GapGRU as GapGRU
from osciformer.baselines.gated_cells import RNNDecay as RNNDecay
from osciformer.baselines.gru_d import GRUD as GRUD
from osciformer.baselines.liquid import ClosedFormContinuous as ClosedFormContinuous
from osciformer.baselines.liquid import LiquidTimeConstant as LiquidTimeConstant
from osciformer.baselines.memory_cells import ContinuousTimeGRU as ContinuousTimeGRU
from osciformer.baselines.memory_cells import LegendreMemoryUnit as LegendreMemoryUnit
from osciformer.baselines.mtan import MultiTimeAttentionNetwork as MultiTimeAttentionNetwork
from osciformer.baselines.ode_cells import GRUODE as GRUODE
from osciformer.baselines.ode_cells import ODELSTM as ODELSTM
from osciformer.baselines.ode_cells import ODERNN as ODERNN
from osciformer.baselines.ode_cells import ContinuousTimeRNN as ContinuousTimeRNN
from osciformer.baselines.ode_cells import GapFlow as GapFlow
from osciformer.baselines.ode_cells import RelaxingCell as RelaxingCell
from osciformer.baselines.oscillating_cells import CoupledOscillators as CoupledOscillators
from osciformer.baselines.oscillating_cells import PhasedLSTM as PhasedLSTM
from osciformer.baselines.recurrence import Cell as Cell
from osciformer.baselines.recurrence import RecurrentBackbone as RecurrentBackbone
from osciformer.baselines.rough_transformer import RoughTransformer as RoughTransformer
from osciformer.baselines.state_space import LRU as LRU
from osciformer.baselines.state_space import S5 as S5
from osciformer.baselines.state_space import LinearRecurrentUnit as LinearRecurrentUnit
from osciformer.baselines.state_space import LinOSS as LinOSS
from osciformer.baselines.state_space import Mamba as Mamba
from osciformer.baselines.state_space import OscillatoryStateSpace as OscillatoryStateSpace
from osciformer.baselines.state_space import S5Layer as S5Layer
from osciformer.baselines.state_space import SelectiveStateSpace as SelectiveStateSpace
from osciformer.baselines.state_space_events import LatentLinearHawkes as LatentLinearHawkes
from osciformer.baselines.state_space_events import StateSpaceEventEncoder as StateSpaceEventEncoder
from osciformer.baselines.transformer import DotProductAttention as DotProductAttention
from osciformer.baselines.transformer import TimeTransformer as TimeTransformer
from osciformer.baselines.transformer import TransformerHawkesEncoder as TransformerHawkesEncoder


def _settings(encoder: str, head: str, **settings: int) -> dict[str, Any]:
    return {"encoder": encoder, "head": head, "dim": 64, "num_layers": 1, **settings}


#: Settings of `EventModelConfig` besides the number of types.
BASELINE_MODELS: dict[str, dict[str, Any]] = {
    "rmtpp": _settings("rmtpp", "exponential"),
    "neural_hawkes": _settings("neural_hawkes", "softplus"),
    "transformer_hawkes": _settings("transformer_hawkes", "decay", num_layers=2, num_heads=4),
    "attnhp": _settings("attnhp", "softplus", num_layers=2, num_heads=4),
    "s2p2": _settings("s2p2", "softplus", num_layers=2),
    "ode_rnn": _settings("ode_rnn", "softplus"),
    "mtan": _settings("mtan", "softplus", num_heads=4),
    # Its width is half that of the others: each pair of an event and a read has a state of its own.
    "contiformer": _settings("contiformer", "softplus", dim=32, num_heads=4),
}
