"""Layers: oscillator attention, resonators, encoder blocks and embeddings."""

from osciformer.nn.attention import AttentionInternals as AttentionInternals
from osciformer.nn.attention import KeyValues as KeyValues
from osciformer.nn.attention import OscillatorAttention as OscillatorAttention
from osciformer.nn.attention import Oscillators as Oscillators
from osciformer.nn.clock import Clock as Clock
from osciformer.nn.encoder import Encoded as Encoded
from osciformer.nn.encoder import Encoder as Encoder
from osciformer.nn.encoder import EncoderBlock as EncoderBlock
from osciformer.nn.encoder import FeedForward as FeedForward
from osciformer.nn.encoder import SeriesEmbedding as SeriesEmbedding
from osciformer.nn.parameters import FrequencyBank as FrequencyBank
from osciformer.nn.parameters import Spectrum as Spectrum
from osciformer.nn.parameters import parameter_groups as parameter_groups
from osciformer.nn.resonator import ResonatorInternals as ResonatorInternals
from osciformer.nn.resonator import ResonatorLayer as ResonatorLayer
from osciformer.nn.timeline import TimeScale as TimeScale
