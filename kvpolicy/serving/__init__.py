"""The HTTP server: an OpenAI-compatible front, and the engine in a process of its own (docs/serving.md)."""
