"""Names in a request (steering, override, adapter) as what a job carries; receipts."""
