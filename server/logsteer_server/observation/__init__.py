"""What the server tells of itself: metrics, logs, traces, and what each of them means."""
