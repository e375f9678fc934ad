"""The HTTP endpoints, one file a resource."""
