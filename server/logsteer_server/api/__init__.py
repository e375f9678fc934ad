"""HTTP: dependencies of routes, encodings, problems."""
