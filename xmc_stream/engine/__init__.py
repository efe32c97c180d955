"""Runs jobs it knows nothing about, on dask: in process by default, on a cluster when given one.

The only package that knows dask.
"""
