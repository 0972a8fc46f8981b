"""What happened: run records, latencies and goodput, phases, timelines, TensorBoard events, pictures."""
