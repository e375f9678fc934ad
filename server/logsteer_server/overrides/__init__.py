"""Directions of the parameters that are kept, and what a request does with them."""
