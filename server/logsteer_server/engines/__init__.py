"""Engines: each runs a language model in a process of its own."""
