"""Tests of the client, with the server played by a script."""
