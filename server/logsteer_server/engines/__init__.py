"""Engines: a language model in a process of its own, and what the HTTP process sees of it."""
