"""The `kvpolicy` command line, one module per command."""
