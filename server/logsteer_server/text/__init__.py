"""Text as tokens: tokenizers, boundaries, windows, sums."""
