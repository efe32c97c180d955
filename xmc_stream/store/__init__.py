"""Datasets, models and scratch matrices on disk: chunked zarr v3 arrays in anndata's sparse encoding.

The only package that knows zarr. It reads the chunk files of local uncompressed stores itself (a chunk file IS the
array), everything else through zarr, which is imported where it is needed.
"""
