"""Engine processes: their start, their heartbeats, the queue of work before them."""
