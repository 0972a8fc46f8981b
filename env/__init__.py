"""Gymnasium environments over the decode engine, imported as `kvpolicy.env`.

Arrives in a later release. What belongs here: the environment classes and their registration.
Encoders, workloads, recorders and cost models belong to `kvpolicy`, which never imports this.
"""
