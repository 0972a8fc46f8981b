"""Learned controllers, imported as `kvpolicy.agents`: train, judge, tune, export (docs/learning.md).

May import `kvpolicy` and `kvpolicy.env`; neither imports this package. Its commands come to the command line
through the entry-point group `kvpolicy.commands`.
"""
