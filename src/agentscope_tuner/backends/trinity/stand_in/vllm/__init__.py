"""A stand-in for vLLM where it is not installed: Trinity imports these names even where a Tinker service computes."""

__version__ = "0.0.0+stand.in"
