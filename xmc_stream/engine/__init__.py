"""Runs jobs it knows nothing about: on threads of this process, or on a dask cluster when one is given.

The only package that knows dask.
"""
