"""What one task does: open stores, hand blocks to a kernel, write the result, return a receipt; and how work is cut.

Nothing here knows a scheduler: a job is a small picklable object with a key and a `run`, whoever calls it.
"""
