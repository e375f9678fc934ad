"""Keys: who may call the server, what for, and how much."""
