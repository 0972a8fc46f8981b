"""Models that decode over the hierarchy, and the embedded one."""
