"""Pure functions of the theory: oscillators, integrals, frequency banks, fits, quadrature."""

from osciformer.math.banks import BankKind as BankKind
from osciformer.math.banks import frequency_bank as frequency_bank
from osciformer.math.banks import frequency_range as frequency_range
from osciformer.math.basis import design_matrix as design_matrix
from osciformer.math.basis import prefix_ridge_fit as prefix_ridge_fit
from osciformer.math.basis import ridge_fit as ridge_fit
from osciformer.math.driven import driven_averages as driven_averages
from osciformer.math.driven import driven_integrals as driven_integrals
from osciformer.math.driven import driven_response as driven_response
from osciformer.math.driven import transfer_function as transfer_function
from osciformer.math.integrals import modulated_averages as modulated_averages
from osciformer.math.integrals import phi1 as phi1
from osciformer.math.oscillator import Moments as Moments
from osciformer.math.oscillator import moments as moments
from osciformer.math.oscillator import propagator as propagator
from osciformer.math.quadrature import gauss_legendre as gauss_legendre
from osciformer.math.quadrature import graded_panels as graded_panels
from osciformer.math.spectrum import damped_frequency as damped_frequency
from osciformer.math.spectrum import decay_rate as decay_rate
from osciformer.math.spectrum import init_omega as init_omega
from osciformer.math.spectrum import init_zeta as init_zeta
from osciformer.math.spectrum import omega_from_raw as omega_from_raw
from osciformer.math.spectrum import raw_from_omega as raw_from_omega
from osciformer.math.spectrum import raw_from_zeta as raw_from_zeta
from osciformer.math.spectrum import regime as regime
from osciformer.math.spectrum import zeta_from_raw as zeta_from_raw
