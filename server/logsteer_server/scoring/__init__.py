"""From texts to scored sequences and back: token boundaries, windows and sums. No engine here."""
