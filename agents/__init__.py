"""Training, evaluation and export of learned controllers, imported as `kvpolicy.agents`.

Arrives in a later release. May import `kvpolicy` and `kvpolicy.env`; neither imports this package.
"""
