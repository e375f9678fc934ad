"""Resolve a request's interventions for its jobs; write receipts."""
