"""Steering: what vectors are, where they are kept, how they are made, and what they do."""
