"""Oscillator attention: query paths, drives and one module per backend."""

from osciformer.ops.attention.drive import Drive as Drive
from osciformer.ops.attention.query import ConstantPath as ConstantPath
from osciformer.ops.attention.query import LinearPath as LinearPath
from osciformer.ops.attention.query import QueryMode as QueryMode
from osciformer.ops.attention.query import QueryPath as QueryPath
from osciformer.ops.attention.query import SinusoidPath as SinusoidPath
from osciformer.ops.attention.query import resolve_query as resolve_query
