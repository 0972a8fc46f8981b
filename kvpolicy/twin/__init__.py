"""The deterministic twin of the engine: recorded selections, the runtime's bookkeeping, a fitted clock."""
