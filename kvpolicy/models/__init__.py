"""Models as the KV hierarchy sees them: geometry as data, presets with sources, KV arithmetic."""
