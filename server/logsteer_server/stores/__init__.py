"""Names that point to contents, durable and bounded; file formats."""
