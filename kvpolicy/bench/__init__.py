"""What `kvpolicy bench` measures: kernels beside their floors, the parts of a step, whole decoding."""
