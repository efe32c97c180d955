"""Jobs and what runs them: a job, a phase, the memory plan; on threads of this process, or on a dask cluster.

A job is a small picklable object with a key and a `run`: it opens stores, hands blocks to a kernel, writes the result and
returns a receipt. The engine knows nothing of what a job does.
"""
