"""Checks and measures logsteer on the GPU of this machine, as far as there is one: see __main__."""
