"""The harmonic approximation theorem as code: any continuous attention, by one oscillator bank.

`docs/theory.md` derives every statement. All of it runs in float64, for proofs and for looking at
what trained models compute, not for training. Letters: M modes beside the zero mode, N keys, T
times, d channels.
"""

from osciformer.theory.attention import ApproximateAttention as ApproximateAttention
from osciformer.theory.attention import Certificate as Certificate
from osciformer.theory.attention import Evidence as Evidence
from osciformer.theory.attention import approximate_attention as approximate_attention
from osciformer.theory.attention import gap_means as gap_means
from osciformer.theory.bank import OscillatorBank as OscillatorBank
from osciformer.theory.bounds import damping_bound as damping_bound
from osciformer.theory.bounds import fejer_bound as fejer_bound
from osciformer.theory.bounds import logit_bound as logit_bound
from osciformer.theory.bounds import output_bound as output_bound
from osciformer.theory.bounds import perturbation_constant as perturbation_constant
from osciformer.theory.bounds import readout_constant as readout_constant
from osciformer.theory.bounds import softmax_bound as softmax_bound
from osciformer.theory.realisation import Path as Path
from osciformer.theory.realisation import fejer_coefficients as fejer_coefficients
from osciformer.theory.realisation import fejer_kernel as fejer_kernel
from osciformer.theory.realisation import fejer_states as fejer_states
from osciformer.theory.realisation import least_squares_states as least_squares_states
from osciformer.theory.realisation import realise as realise
from osciformer.theory.realisation import shift_phase as shift_phase
