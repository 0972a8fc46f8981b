"""The memory hierarchy: a host pool that holds every row, a device arena that holds what a policy keeps."""
