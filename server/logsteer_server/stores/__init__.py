"""The stores: names that point to contents, and the contents' file formats."""
