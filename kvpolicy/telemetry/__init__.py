"""What happened: run records and latency statistics."""
