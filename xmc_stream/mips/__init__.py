"""Maximum-inner-product search: vectors of classes that change, and oracles that find the best class for a row.

Knows kernels, memory and errors. It reads and writes no files.
"""
