"""What endpoints do: a request's plan, its jobs, its answer."""
