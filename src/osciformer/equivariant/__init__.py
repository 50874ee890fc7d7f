"""OsciFormer for points in space: results turn, mirror and move with the input. Needs e3nn."""

from osciformer.equivariant.attention import AveragedOscillators as AveragedOscillators
from osciformer.equivariant.attention import Bridge as Bridge
from osciformer.equivariant.attention import EquivariantAttention as EquivariantAttention
from osciformer.equivariant.irreps import Coupling as Coupling
from osciformer.equivariant.irreps import Kinds as Kinds
from osciformer.equivariant.irreps import couple as couple
from osciformer.equivariant.layers import ChannelLinear as ChannelLinear
from osciformer.equivariant.layers import ChannelNorm as ChannelNorm
from osciformer.equivariant.layers import GatedFeedForward as GatedFeedForward
from osciformer.equivariant.model import EquivariantBlock as EquivariantBlock
from osciformer.equivariant.model import EquivariantOsciFormer as EquivariantOsciFormer
from osciformer.equivariant.neighbours import Neighbours as Neighbours
from osciformer.equivariant.neighbours import Observations as Observations
from osciformer.equivariant.neighbours import find_neighbours as find_neighbours
from osciformer.equivariant.radial import RadialBasis as RadialBasis
