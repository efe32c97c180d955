"""Compiled loops: arrays and scalars in, arrays out. The only package that knows numba.

Nothing here opens files, allocates what grows with the data without being told, or knows of jobs.
"""
