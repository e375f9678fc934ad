"""Resident models: state, admission, result cache, provenance."""
