"""The suite that measures the CUDA backend against its own bounds and against its peers.

A part is a list of cases; a case is a name with plain settings, run in a process of its own, which prints
one JSON object. What a case printed is kept in ``results/<part>.json`` as soon as it is over, and a case
that is there is not run again.
"""
