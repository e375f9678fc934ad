"""Arithmetic that all engines share: rows, sampling, operations on the residual stream, LoRA."""
