"""From requests for text to generation jobs, and from their outputs to answers. No engine here."""
